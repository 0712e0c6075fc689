from __future__ import annotations

import mmap

import numpy as np
import pyarrow as pa
import pytest

from storage import CorruptionError, FeatureStore, RowNotFoundError, TensorColumnError

DTYPES = ["bool", "uint8", "int16", "int64", "float16", "float32", "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 4)])
def test_every_dtype_and_shape(empty, dtype, shape):
    rng = np.random.default_rng(0)
    data = (rng.random((50, *shape)) * 100).astype(dtype)
    with empty.writer(tensors={"x": (dtype, shape)}) as writer:
        for i in range(50):
            writer.add(str(i), tensors={"x": data[i] if shape else np.array(data[i])})
    store = empty.refresh()
    column = store.tensor("x")
    assert (column.dtype, column.shape) == (np.dtype(dtype), shape)
    assert np.array_equal(column[0:50], data) and np.array_equal(column[7:9], data[7:9])
    rows = rng.integers(0, 50, 200)
    assert np.array_equal(column.gather(rows), data[rows])
    assert store.tensor_columns == {"x": (np.dtype(dtype), shape)}


def test_rows_are_64_byte_aligned_and_arrow_reads_them(filled, codes_of):
    for part in filled.snapshot.parts:
        file = part.tensors["codes"]
        assert file.offset % 64 == 0
        with pa.memory_map(str(filled.path / file.path)) as source:
            table = pa.ipc.open_file(source).read_all()
        array = table.column("codes").combine_chunks().to_numpy_ndarray()
        assert np.array_equal(array[3], codes_of(part.first_row + 3))
        assert table.schema.field("codes").type == pa.fixed_shape_tensor(pa.int16(), (8,))
    assert filled.tensor("codes")[0:5].ctypes.data % 64 == 0


def test_rows_are_aligned_whatever_the_header_is(empty):
    """A header is longer with a longer name, another dtype or more axes."""
    tensors = {"a" * n: np.full((1,) * (n % 4), n, np.uint8 if n % 2 else np.float64) for n in range(1, 41)}
    empty.append([{"key": "a", "tensors": tensors}, {"key": "b", "tensors": tensors}])
    store = empty.refresh()
    for name, array in tensors.items():
        file = store.snapshot.parts[0].tensors[name]
        assert file.offset % 64 == 0 and store.tensor(name)[0:2].ctypes.data % 64 == 0
        assert np.array_equal(store.tensor(name)[0:2], [array, array])


def test_views_copy_nothing_and_may_be_written_to(filled, codes_of):
    column = filled.tensor("codes")
    view = column[10:20]
    view[:] = -1
    assert np.array_equal(column[10:11][0], codes_of(10))
    assert np.array_equal(column.gather(np.array([10]))[0], codes_of(10))
    assert view[5, 0] == -1
    assert FeatureStore.open(filled.path).verify().ok
    assert filled.counters.bytes_copied == 16
    assert filled.counters.bytes_read == (10 + 1 + 1) * 16


def test_gather_fills_what_it_is_given(filled, codes_of):
    rows = np.array([99, 0, 60, 59, 0])
    out = np.empty((5, 8), np.int16)
    assert filled.tensor("codes").gather(rows, out=out) is out
    assert np.array_equal(out, np.stack([codes_of(i) for i in rows]))
    for wrong in (
        np.empty((4, 8), np.int16),
        np.empty((5, 8), np.int32),
        np.empty((5, 16), np.int16)[:, ::2],
    ):
        with pytest.raises(TensorColumnError, match="wanted C-contiguous"):
            filled.tensor("codes").gather(rows, out=wrong)
    assert filled.tensor("codes").gather(np.array([], np.int64)).shape == (0, 8)
    with pytest.raises(RowNotFoundError, match="float64"):
        filled.tensor("codes").gather(np.array([1.0]))


def test_large_rows_gather_over_parts(empty):
    data = np.random.default_rng(0).integers(0, 255, (30, 64, 64), np.uint8)
    for start in (0, 10, 20):
        empty.append({"key": str(i), "tensors": {"x": data[i]}} for i in range(start, start + 10))
    rows = np.random.default_rng(1).integers(0, 30, 100)
    assert np.array_equal(empty.refresh().tensor("x").gather(rows), data[rows])


def test_views_stay_within_a_shard(filled):
    column = filled.tensor("codes")
    with pytest.raises(TensorColumnError, match="more than one shard; use gather"):
        column[59:61]
    assert column[5:5].shape == (0, 8)
    for bad in (slice(None), slice(0, 4, 2), slice(5, 3), slice(95, 101), slice(-2, 4), 3):
        with pytest.raises((TensorColumnError, RowNotFoundError)):
            column[bad]


def test_a_view_outlives_its_store(filled, codes_of):
    view = filled.tensor("codes")[0:4]
    blob = filled.blob(33)
    expected = bytes(blob)
    del filled
    assert np.array_equal(view[3], codes_of(3)) and bytes(blob) == expected


def test_rows_that_do_not_fit_are_refused(empty):
    with empty.writer(tensors={"x": ("float32", (2,))}) as writer:
        with pytest.raises(
            TensorColumnError, match=r"key 'a': tensor 'x' is float64\(2,\), the column holds float32"
        ):
            writer.add("a", tensors={"x": np.zeros(2)})
        with pytest.raises(TensorColumnError, match=r"float32\(3,\)"):
            writer.add("a", tensors={"x": np.zeros(3, np.float32)})
        with pytest.raises(TensorColumnError, match="list"):
            writer.add("a", tensors={"x": [0.0, 1.0]})
        with pytest.raises(TensorColumnError, match=r"tensors \[\], every row of this commit has \['x'\]"):
            writer.add("a")
        with pytest.raises(TensorColumnError, match="'y'"):
            writer.add("a", tensors={"x": np.zeros(2, np.float32), "y": np.zeros(1)})
        writer.add("a", tensors={"x": np.ones(2, np.float32)})
    with pytest.raises(TensorColumnError, match=r"float32\(2,\) in snapshot 1"):
        empty.append([{"key": "b", "tensors": {"x": np.zeros(2)}}])
    with pytest.raises(TensorColumnError, match="in snapshot 1"):
        empty.writer(tensors={"x": ("int8", (2,))})
    assert not list((empty.path / "staging").iterdir())


def test_names_dtypes_and_shapes_are_checked(empty):
    for name in ("", "../x", "a/b", ".hidden", "x" * 200, "é"):
        with pytest.raises(TensorColumnError, match="cannot be used"):
            empty.writer(tensors={name: ("int8", (1,))})
    for dtype in ("complex64", "U5", "object", ">i4"):
        with pytest.raises(TensorColumnError, match="cannot be stored"):
            empty.writer(tensors={"x": (dtype, (1,))})
    with pytest.raises(TensorColumnError, match="empty axis"):
        empty.writer(tensors={"x": ("int8", (0,))})
    for shape in ((1,) * 33, (1 << 60,), (1 << 40, 1 << 40)):
        with pytest.raises(TensorColumnError, match="at most 32 axes and fewer than 2\\^60 bytes"):
            empty.writer(tensors={"x": ("int8", shape)})


class _OtherArray:
    """As torch tensors are: a dtype and a shape, but no numpy array."""

    dtype, shape = "float", (2,)


@pytest.mark.parametrize(
    "value",
    [[0.0, 1.0], 1.0, _OtherArray(), np.ma.masked_array([0.0, 1.0], [True, False])],
    ids=["list", "float", "other library", "masked"],
)
def test_only_numpy_arrays_are_tensors(empty, value):
    with empty.writer() as writer:
        with pytest.raises(TensorColumnError, match="key 'a': tensor 'x' is"):
            writer.add("a", tensors={"x": value})
        with pytest.raises(TensorColumnError, match="tensors is list"):
            writer.add("a", tensors=[("x", np.zeros(2))])
        writer.add("a", tensors={"x": np.zeros(2)})
    assert len(empty.refresh()) == 1


def test_rows_without_the_column_say_what_to_do(filled):
    filled.append([{"key": "plain"}])
    store = filled.refresh()
    with pytest.raises(TensorColumnError, match=r"row 100, key 'plain', has no tensor 'codes'.*add_column"):
        store.tensor("codes").gather(np.array([1, 100]))
    with pytest.raises(TensorColumnError, match="did you mean 'codes'"):
        store.tensor("code")


def test_offsets_need_no_page_alignment(empty):
    row = np.arange(1000, dtype=np.int32)
    empty.append({"key": str(i), "tensors": {"x": row + i}} for i in range(20))
    column = empty.refresh().tensor("x")
    for start in range(20):
        view = column[start : start + 1]
        assert np.array_equal(view[0], row + start)
    assert (4000 * 3) % mmap.ALLOCATIONGRANULARITY


def test_a_shard_that_was_cut_while_mapped_is_an_error_where_it_was_not_read_yet(empty):
    empty.append({"key": str(i), "tensors": {"x": np.full(1 << 16, i, np.int32)}} for i in range(8))
    store = empty.refresh()
    assert store.tensor("x").gather(np.array([0]))[0, 0] == 0
    path = store.path / store.snapshot.parts[0].tensors["x"].path
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    for read in (lambda: store.tensor("x").gather(np.array([7])), lambda: store.tensor("x")[7:8]):
        with pytest.raises(CorruptionError, match=r"bytes"):
            read()
    assert store.tensor("x").gather(np.array([0]))[0, 0] == 0
