from __future__ import annotations

import multiprocessing

import pytest

from storage import FeatureStore, ManifestError, SnapshotNotFoundError, StorageError


def test_orphans_go_and_everything_listed_stays(filled, codes_of):
    part_id = filled.snapshot.parts[0].id
    orphans = [
        "index/part-dead.parquet",
        "index/part-dead.keys.arrow",
        "blobs/dead/data.mdb",
        "tensors/codes/dead.arrow",
        "quarantine/part-dead.parquet",
        "staging/dead/writer.lock",
        "staging/dead/blobs/data.mdb",
        "staging/snapshot-dead.json",
        f"tensors/codes/{part_id}-dead.arrow",
    ]
    for name in orphans:
        path = filled.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1234")
    assert filled.gc().removed == []
    report = filled.gc(grace_s=0)
    assert report.removed == sorted(orphans) and report.bytes == 4 * len(orphans)
    assert not (filled.path / "blobs" / "dead").exists() and not (filled.path / "staging" / "dead").exists()
    assert filled.verify().ok and FeatureStore.open(filled.path, snapshot=1).verify().ok


def test_a_live_writer_keeps_its_files(filled, codes_of):
    with filled.writer() as writer:
        writer.add("slow", b"1" * 100_000, {"codes": codes_of(1)}, width=1)
        assert filled.gc(grace_s=0).removed == []
    assert filled.refresh().blob(100) == b"1" * 100_000

    def compute(view):
        assert filled.gc(grace_s=0).removed == []
        return view.rows

    filled.add_column("n", compute, dtype="int64", shape=())
    assert filled.gc(grace_s=0).removed == []
    assert filled.refresh().verify().ok


def test_nothing_is_removed_while_a_snapshot_cannot_be_read(filled):
    (filled.path / "snapshots" / "00000001.json").write_bytes(b"{")
    (filled.path / "index" / "part-dead.parquet").write_bytes(b"")
    with pytest.raises(ManifestError, match="00000001"):
        filled.gc(grace_s=0)
    assert (filled.path / "index" / "part-dead.parquet").exists()


def snapshot_numbers(store):
    return sorted(int(path.stem) for path in (store.path / "snapshots").iterdir())


def test_old_snapshots_go_but_not_what_is_tagged_or_open(tmp_path, filler):
    path = FeatureStore.create(tmp_path / "store").path
    for start in range(0, 60, 10):
        filler(FeatureStore.open(path), start, start + 10)
    reader = FeatureStore.open(path, snapshot=2)
    FeatureStore.open(path).tag("kept", 4)
    store = FeatureStore.open(path)
    assert store.gc(grace_s=3600, keep_last=1).removed == []
    report = store.gc(grace_s=0, keep_last=1)
    assert snapshot_numbers(store) == [2, 4, 6]
    assert report.removed == [f"snapshots/{n:08d}.json" for n in (0, 1, 3, 5)]
    assert reader.verify().ok and store.at("kept").verify().ok and [s.id for s in store.log()] == [6]
    with pytest.raises(SnapshotNotFoundError, match="no snapshot 3; the store has 2 to 6"):
        FeatureStore.open(path, snapshot=3)
    del reader
    store.untag("kept")
    store.gc(grace_s=0, keep_last=1)
    assert snapshot_numbers(store) == [6]
    with pytest.raises(StorageError, match="the least"):
        store.gc(keep_last=0)


def test_a_handle_keeps_the_parts_that_were_compacted(filled, blob_of):
    newest = filled.at(filled.compact().id)
    newest.gc(grace_s=0, keep_last=1)
    assert 1 not in snapshot_numbers(newest) and 2 in snapshot_numbers(newest)
    assert filled.blob(3) == blob_of(3) and filled.verify().ok


def _read_until_told(path, connection):
    store = FeatureStore.open(path)
    connection.send("open")
    connection.recv()
    connection.send(store.verify().ok and len(store))


def test_a_reader_in_another_process_keeps_its_snapshot(tmp_path, filler):
    store = filler(FeatureStore.create(tmp_path / "store"), 0, 20)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    child = context.Process(target=_read_until_told, args=(store.path, theirs))
    child.start()
    assert mine.recv() == "open"
    store.delete("width < 10")
    store = store.refresh()
    store.compact()
    store = store.refresh()
    store.gc(grace_s=0, keep_last=1)
    assert 1 in snapshot_numbers(store)
    mine.send("read")
    assert mine.recv() == 20
    child.join()
    removed = store.gc(grace_s=0, keep_last=1).removed
    assert snapshot_numbers(store) == [3] and any(name.startswith("blobs/") for name in removed)
    assert store.verify().ok and len(store.select()) == 10
