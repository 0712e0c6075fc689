"""Rows with equal blobs share the bytes, and stay rows of their own in everything else."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest

from storage import FeatureStore, repair_store
from storage import blobs as blob_module

PICTURE = bytes(range(256)) * 200


@pytest.fixture
def shared(tmp_path: Path) -> FeatureStore:
    """Five captions of one picture, among others; small blobs and empty ones twice too."""
    store = FeatureStore.create(tmp_path / "store")
    store.append(
        [
            {"key": "a", "blob": PICTURE, "caption": "one"},
            {"key": "small", "blob": b"xy"},
            {"key": "b", "blob": PICTURE[::-1]},
            *({"key": f"a{i}", "blob": PICTURE, "caption": f"another {i}"} for i in range(4)),
            {"key": "small again", "blob": b"xy"},
            {"key": "none"},
            {"key": "empty", "blob": b""},
            {"key": "empty again", "blob": b""},
        ]
    )
    return store.refresh()


def entries(store: FeatureStore) -> int:
    path = store.path / store.snapshot.parts[0].blobs.path
    with lmdb.open(str(path.parent), readonly=True, lock=False) as database:
        return database.stat()["entries"]


def test_bytes_are_stored_once(shared: FeatureStore) -> None:
    assert entries(shared) == 5  # the picture, its mirror image, the small one, and the two empty ones
    assert shared.path.joinpath(shared.snapshot.parts[0].blobs.path).stat().st_size < 3 * len(PICTURE)
    view = shared.select("bytes IS NOT NULL")
    assert len(view) == 10
    for row, key in zip(view.rows.tolist(), view.keys()):
        wanted = {"a": PICTURE, "b": PICTURE[::-1], "s": b"xy", "e": b""}[key[0]]
        assert bytes(shared.blob(row)) == wanted
    assert shared.select().column("caption").to_pylist()[3:7] == [f"another {i}" for i in range(4)]
    assert shared.verify(deep={}).ok


def test_compaction_and_deletion_of_the_first_row_keep_the_others(shared: FeatureStore) -> None:
    shared.delete("key = 'a'")
    store = shared.refresh()
    assert bytes(store.blob(3)) == PICTURE
    store.compact()
    store = store.refresh()
    assert all(bytes(store.blob(row)) == PICTURE for row in (3, 4, 5, 6))
    assert entries(store) == 5
    assert store.verify(deep={}).ok


def test_equal_checksums_of_other_bytes_share_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Colliding:
        xxh3_128_digest = staticmethod(lambda blob: b"0" * 16)
        xxh3_128_hexdigest = staticmethod(lambda blob: (b"0" * 16).hex())

    writer_folder = tmp_path / "blobs"
    writer_folder.mkdir()
    monkeypatch.setattr(blob_module, "xxhash", Colliding)
    writer = blob_module.BlobWriter(writer_folder)
    for key, blob in ((b"a", b"first" * 9), (b"b", b"other" * 9), (b"c", b"first" * 9)):
        writer.add(key, blob)
    offsets, _, _ = writer.seal([b"a", b"b", b"c"].__getitem__)
    content = (writer_folder / "data.mdb").read_bytes()
    assert [content[at : at + 45] for at in offsets] == [b"first" * 9, b"other" * 9, b"first" * 9]
    assert offsets[0] == offsets[2]


def test_only_the_last_blobs_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_module, "_NUM_REMEMBERED", 2)
    store = FeatureStore.create(tmp_path / "store")
    blobs = [b"a" * 99, b"b" * 99, b"a" * 99, b"c" * 99, b"d" * 99, b"e" * 99, b"a" * 99]
    store.append([{"key": str(i), "blob": blob} for i, blob in enumerate(blobs)])
    store = store.refresh()
    assert [bytes(store.blob(i)) for i in range(len(blobs))] == blobs
    assert entries(store) == 6
    assert store.verify(deep={}).ok


def test_a_lost_key_table_loses_no_row(shared: FeatureStore) -> None:
    path = shared.path / shared.snapshot.parts[0].keys.path
    path.chmod(0o644)
    path.write_bytes(b"")
    report = repair_store(shared.path)
    assert report.lost == []
    store = FeatureStore.open(shared.path)
    assert all(bytes(store.blob(row)) == PICTURE for row in (0, 3, 4, 5, 6))
    assert store.verify(deep={}).ok
