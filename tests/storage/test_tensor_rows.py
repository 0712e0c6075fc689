"""One row of a tensor column, and what reading costs in memory."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from storage import FeatureStore, RowNotFoundError, TensorColumnError


def test_one_row_is_a_copy_of_its_own(filled, codes_of):
    column = filled.tensor("codes")
    row = column.row(filled.row("k00077"))
    assert np.array_equal(row, codes_of(77)) and row.dtype == np.int16
    assert filled.counters.bytes_copied == filled.counters.bytes_read == 16
    row[:] = -1
    assert np.array_equal(column.row(77), codes_of(77))
    for missing in (-1, 100):
        with pytest.raises(RowNotFoundError, match=f"no row {missing}"):
            column.row(missing)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_a_row_has_the_shape_of_the_column(empty, shape):
    empty.append({"key": str(i), "tensors": {"x": np.full(shape, i % 2 == 0)}} for i in range(5))
    column = empty.refresh().tensor("x")
    rows = [column.row(i) for i in range(5)]
    assert all(isinstance(row, np.ndarray) and row.shape == shape and row.dtype == bool for row in rows)
    assert [bool(row.all()) for row in rows] == [True, False, True, False, True]


def test_a_row_after_deletion_and_compaction(filled, codes_of):
    filled.delete("width % 3 = 0")
    filled.refresh().compact()
    column = filled.refresh().tensor("codes")
    assert all(np.array_equal(column.row(i), codes_of(i)) for i in range(100) if i % 3)
    with pytest.raises(RowNotFoundError, match="no row 33; it was deleted"):
        column.row(33)


def test_a_row_without_a_value_is_refused(filled):
    values = [(f"k{i:05d}", np.int32([i])) for i in (3, 7, 11)]
    filled.add_column("f", values, dtype="int32", shape=(1,), sparse=True)
    column = filled.refresh().tensor("f")
    assert [column.row(i).tolist() for i in (3, 7, 11)] == [[3], [7], [11]]
    for row in (4, 99):
        with pytest.raises(TensorColumnError, match=f"row {row}, key 'k{row:05d}', has no tensor 'f'"):
            column.row(row)


@pytest.mark.parametrize("policy", ["first-read", "always", "never"])
def test_a_row_is_checked_as_the_policy_says(cold, policy, codes_of):
    store = FeatureStore.open(cold, verify=policy)
    file = store.snapshot.parts[0].tensors["codes"]
    path = cold / file.path
    content = bytearray(path.read_bytes())
    content[file.offset + 16 * 7] ^= 1
    path.write_bytes(content)
    if policy == "never":
        assert store.tensor("codes").row(7)[0] == codes_of(7)[0] ^ 1
    else:
        with pytest.raises(Exception, match="do not match their checksum"):
            store.tensor("codes").row(3)


def test_a_column_is_pickled_without_its_maps(filled, codes_of):
    column = filled.tensor("codes")
    column.gather(np.arange(100))
    content = pickle.dumps(column)
    assert len(content) < 1000
    assert np.array_equal(pickle.loads(content).row(5), codes_of(5))  # noqa: S301


def test_batches_are_views_of_aligned_memory(empty):
    data = np.random.default_rng(0).standard_normal((40, 16)).astype(np.float32)
    empty.append({"key": str(i), "tensors": {"x": data[i]}} for i in range(40))
    store = empty.refresh()
    column = store.tensor("x")
    for start in range(0, 40, 8):
        batch = column[start : start + 8]
        assert batch.ctypes.data % 64 == 0 and batch.base is not None
    assert store.counters.bytes_copied == 0


@pytest.mark.parametrize("reading", ["views", "gather", "rows"])
def test_a_column_larger_than_the_memory_limit_is_read(tmp_path: Path, reading: str) -> None:
    """The heap and every other private map are held to 64 MiB more; the column has 96 MiB."""
    store = FeatureStore.create(tmp_path / "store")
    with store.writer(tensors={"x": (np.uint8, (1 << 20,))}) as writer:
        for i in range(96):
            writer.add(str(i), None, {"x": np.full(1 << 20, i, np.uint8)})
    script = textwrap.dedent(
        """
        import resource, sys
        from pathlib import Path
        import numpy as np
        from storage import FeatureStore

        def held():
            lines = Path("/proc/self/status").read_text().splitlines()
            return 1024 * int(next(line for line in lines if line.startswith("VmData")).split()[1])

        column = FeatureStore.open(sys.argv[1]).tensor("x")
        out = np.empty((4, 1 << 20), np.uint8)
        column.gather(np.arange(4), out)
        before = held()
        resource.setrlimit(resource.RLIMIT_DATA, (before + (64 << 20), before + (64 << 20)))
        for _ in range(3):
            for start in range(0, 96, 4):
                if sys.argv[2] == "views":
                    batch = column[start : start + 4]
                elif sys.argv[2] == "gather":
                    batch = column.gather(np.arange(start, start + 4), out)
                else:
                    batch = np.stack([column.row(row) for row in range(start, start + 4)])
                assert batch[:, -1].tolist() == list(range(start, start + 4))
        print(held() - before)
        try:
            bytearray(96 << 20)
        except MemoryError:
            print("the limit holds")
        """
    )
    command = [sys.executable, "-c", script, str(store.path), reading]
    grown, limit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert int(grown) < 16 << 20
    assert limit == "the limit holds"
