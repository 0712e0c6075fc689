"""Field cases of LMDB: a full map, reader slots, forks, paths opened twice, full disks, several writers."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
import threading

import lmdb
import pytest

from storage import FeatureStore, StorageError
from storage.blobs import BlobWriter


@pytest.fixture
def store(tmp_path):
    store = FeatureStore.create(tmp_path / "store")
    store.append({"key": f"k{i}", "blob": b"%d" % i * 500, "n": i} for i in range(50))
    return store.refresh()


def test_lmdb_01_map_full_grows_and_loses_nothing(tmp_path):
    (tmp_path / "blobs").mkdir()
    writer = BlobWriter(tmp_path / "blobs", map_bytes=64 << 10)
    keys = [b"key-%03d" % i for i in range(100)]
    for i, key in enumerate(keys):
        writer.add(key, bytes([i]) * 4096)
    offsets, lengths, _ = writer.seal(keys.__getitem__)
    content = writer.path.read_bytes()
    assert lengths.tolist() == [4096] * 100
    assert all(
        content[offset : offset + 4096] == bytes([i]) * 4096 for i, offset in enumerate(offsets.tolist())
    )
    with lmdb.open(str(tmp_path / "blobs"), readonly=True, lock=False) as env, env.begin() as transaction:
        assert [transaction.get(key) for key in keys] == [bytes([i]) * 4096 for i in range(100)]


def test_lmdb_01_a_commit_larger_than_the_first_map(store):
    blob = os.urandom(1 << 20)
    with store.writer() as writer:
        for i in range(150):
            writer.add(f"big{i}", i.to_bytes(2, "big") + blob)
    newer = store.refresh()
    assert all(newer.blob(50 + i) == i.to_bytes(2, "big") + blob for i in range(0, 150, 7))


def _hold_and_wait(store: FeatureStore, ready) -> None:
    blob = store.blob(7)
    ready.send(bytes(blob) == b"7" * 500)
    signal.pause()


def test_lmdb_02_no_number_of_readers_is_too_many(store):
    handles = [FeatureStore.open(store.path) for _ in range(300)]
    threads = [threading.Thread(target=handle.blob, args=(i % 50,)) for i, handle in enumerate(handles)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(handle.blob(3) == b"3" * 500 for handle in handles)


def test_lmdb_02_killed_readers_leave_nothing_behind(store):
    context = multiprocessing.get_context("fork")
    for _ in range(20):
        mine, theirs = context.Pipe()
        child = context.Process(target=_hold_and_wait, args=(store, theirs))
        child.start()
        assert mine.recv()
        child.kill()
        child.join()
    names = {path.name for path in store.path.rglob("*") if path.is_file()}
    assert "lock.mdb" not in names
    store.append([{"key": "after", "blob": b"x"}])
    assert store.refresh().blob(50) == b"x"


def _read(store: FeatureStore, row: int) -> tuple[bytes, int]:
    return bytes(store.blob(row)), len(store.select("n < 10"))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_lmdb_03_workers_of_every_kind_read_after_the_parent_did(store, method):
    assert _read(store, 4) == (b"4" * 500, 10)
    copy = pickle.loads(pickle.dumps(store))  # noqa: S301
    with multiprocessing.get_context(method).Pool(2) as pool:
        results = pool.starmap_async(_read, [(copy, row) for row in range(10)]).get(timeout=120)
    assert results == [(b"%d" % row * 500, 10) for row in range(10)]
    assert _read(store, 5) == (b"5" * 500, 10)


def test_lmdb_04_one_path_opened_three_ways(store, monkeypatch):
    link = store.path.parent / "link"
    link.symlink_to(store.path)
    monkeypatch.chdir(store.path.parent)
    handles = [FeatureStore.open("store"), FeatureStore.open(store.path), FeatureStore.open(link)]
    blobs = [handle.blob(9) for handle in handles]
    del handles[0]
    assert handles[0].blob(10) == b"10" * 500 and all(blob == b"9" * 500 for blob in blobs)
    with lmdb.open(
        str((store.path / store.snapshot.parts[0].blobs.path).parent), readonly=True, lock=False
    ) as env:
        assert env.stat()["entries"] == 50
    assert handles[1].blob(11) == b"11" * 500


def _append_until_full(path, connection) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        FeatureStore.open(path).append({"key": f"x{i}", "blob": os.urandom(1 << 16)} for i in range(128))
    except OSError as error:
        connection.send((isinstance(error, StorageError), str(error)))


def test_lmdb_07_a_full_disk_is_an_error_and_keeps_the_last_commit(store):
    """A limit on file sizes stands for the full disk: both make the write fail, neither may be a SIGBUS."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_append_until_full, args=(store.path, theirs))
    child.start()
    is_ours, text = mine.recv()
    child.join()
    assert child.exitcode == 0 and is_ours and "cannot be written" in text
    newest = store.refresh()
    assert newest.snapshot.id == 1 and newest.verify().ok
    assert newest.gc(grace_s=0).removed == []
    newest.append([{"key": "fits", "blob": b"1"}])


def _write_rows(path, name: int) -> None:
    FeatureStore.open(path).append({"key": f"{name}-{i}", "blob": b"%d" % i} for i in range(200))


def test_lmdb_08_two_writers_share_no_database(store):
    children = [
        multiprocessing.get_context("spawn").Process(target=_write_rows, args=(store.path, i)) for i in (1, 2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    newest = store.refresh()
    assert len(newest) == 450 and newest.verify().ok
    assert len({part.blobs.path for part in newest.snapshot.parts}) == 3
