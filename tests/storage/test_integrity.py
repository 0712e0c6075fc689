from __future__ import annotations

import numpy as np
import pytest

from storage import CorruptionError, FeatureStore


def flip(path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def blob_offset(store: FeatureStore, row: int) -> int:
    return int(store.part(0).keys("never").blob_offset[row])


def test_a_whole_store_verifies(filled):
    report = filled.verify()
    assert report.ok and report.problems == [] and report.files == 8
    assert report.bytes == sum(
        p.stat().st_size for p in filled.path.rglob("*.*") if p.parent.name != "snapshots"
    )


def test_a_flipped_blob_byte_is_an_error_with_its_place(filled, blob_of):
    part = filled.snapshot.parts[0]
    flip(filled.path / part.blobs.path, blob_offset(filled, 41) + 700)
    store = FeatureStore.open(filled.path, verify="always")
    for _ in range(2):
        with pytest.raises(
            CorruptionError, match=r"data\.mdb: blob of key 'k00041': its 1519 bytes from byte \d+"
        ):
            store.blob(41)
    assert store.blob(40) == blob_of(40) and store.blob(42) == blob_of(42)
    assert len(FeatureStore.open(filled.path, verify="never").blob(41)) == 1519
    problems = store.verify().problems
    assert [p.path for p in problems] == [part.blobs.path] and "'k00041'" in problems[0].text


def test_first_read_looks_once_and_always_looks_every_time(filled, blob_of):
    path = filled.path / filled.snapshot.parts[0].blobs.path
    offset = blob_offset(filled, 41)
    filled.blob(41)
    flip(path, offset)
    assert filled.blob(41) != blob_of(41)
    with pytest.raises(CorruptionError):
        FeatureStore.open(filled.path, verify="always").blob(41)


def test_a_flipped_tensor_byte_names_its_rows(empty):
    data = np.random.default_rng(0).random((600, 512), np.float32)
    empty.append({"key": str(i), "tensors": {"x": row}} for i, row in enumerate(data))
    store = empty.refresh()
    file = store.snapshot.parts[0].tensors["x"]
    flip(store.path / file.path, file.offset + 300 * 2048 + 5)
    column = store.tensor("x")
    assert np.array_equal(column[0:256], data[:256]) and np.array_equal(column[384:600], data[384:])
    for read in (lambda: column[290:310], lambda: column.gather(np.array([5, 300]))):
        with pytest.raises(CorruptionError, match=r"rows 256 to 383 of the part \(from byte \d+\)"):
            read()
    problems = store.verify().problems
    assert [p.path for p in problems] == [file.path] and "rows 256 to 383" in problems[0].text
    assert np.array_equal(FeatureStore.open(store.path, verify="never").tensor("x")[0:256], data[:256])


def test_a_flipped_bit_anywhere_is_found_and_never_handed_out(cold, blob_of, codes_of):
    rng = np.random.default_rng(7)
    for path in [p for p in cold.rglob("*") if p.is_file() and p.parent not in (cold, cold / "snapshots")]:
        for offset in rng.integers(0, path.stat().st_size, 4).tolist():
            flip(path, offset)
            store = FeatureStore.open(cold, verify="always")
            problems = store.verify().problems
            assert [p.path for p in problems] == [path.relative_to(cold).as_posix()]
            _read_everything(store, blob_of, codes_of)
            flip(path, offset)
    assert FeatureStore.open(cold).verify().ok


def _read_everything(store: FeatureStore, blob_of, codes_of) -> None:
    reads = [
        lambda i: store.key(i) == f"k{i:05d}",
        lambda i: store.row(f"k{i:05d}") == i,
        lambda i: store.blob(i) == blob_of(i),
        lambda i: np.array_equal(store.tensor("codes")[i : i + 1][0], codes_of(i)),
        lambda i: store.select(f"width = {i}").column("caption").to_pylist() == [f"sample {i}"],
    ]
    for read in reads:
        for i in (0, 33, 59, 60, 99):
            try:
                assert read(i)
            except CorruptionError:
                continue


def test_verify_counts_every_kind_of_problem(filled):
    part = filled.snapshot.parts[0]
    (filled.path / part.index.path).unlink()
    with (filled.path / part.tensors["codes"].path).open("ab") as file:
        file.write(b"more")
    (filled.path / "snapshots" / "00000001.json").write_bytes(b"{}")
    report = filled.verify()
    assert not report.ok
    assert {p.path for p in report.problems} == {
        part.index.path,
        part.tensors["codes"].path,
        "snapshots/00000001.json",
    }
