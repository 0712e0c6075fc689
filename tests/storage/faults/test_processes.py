"""Readers that fork, are killed, share a path, or ask for keys that no store has."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time

import lmdb
import numpy as np
import pytest

from storage import FeatureStore, StorageError


def _read(store: FeatureStore, blob_of, row: int) -> None:
    assert store.blob(row) == blob_of(row) and store.row(f"k{row}") == row
    assert store.tensor("x")[row : row + 1].tolist() == [[row] * 4]
    assert store.select(f"number = {row}").column("split").to_pylist() == ["a"]


def _in_child(function) -> int:
    """Run in a forked child; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        function()
        code = 0
    finally:
        os._exit(code)


def _wait(pid: int, seconds: float = 30.0) -> int:
    """The exit code of a child, which is killed when it takes too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("a child hangs")


def test_forks_while_other_threads_read(copy, blob_of):
    """A lock that a thread holds at the moment of the fork must not stay held in the child."""
    stop = threading.Event()

    def read_on() -> None:
        while not stop.wait(0.001):
            store = FeatureStore.open(copy)
            store.blob(3), store.row("k7"), store.tensor("x")[0:2], store.select().column("number")

    threads = [threading.Thread(target=read_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for i in range(8):
            row = [8, 21, 29][i % 3]
            assert _wait(_in_child(lambda row=row: _read(FeatureStore.open(copy), blob_of, row))) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_child_of_a_child_reads_and_commits(copy, blob_of):
    store = FeatureStore.open(copy)
    _read(store, blob_of, 8)

    def child() -> None:
        _read(store, blob_of, 9)

        def grandchild() -> None:
            _read(store, blob_of, 21)
            store.append([{"key": "late", "blob": b"1", "tensors": {"x": np.zeros(4, np.int32)}}])

        assert _wait(_in_child(grandchild)) == 0
        assert store.refresh().row("late") == 30

    assert _wait(_in_child(child)) == 0
    assert store.refresh().row("late") == 30
    _read(store, blob_of, 22)


def test_a_hundred_killed_readers_leave_nothing(copy, blob_of):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    store = FeatureStore.open(copy)

    def read_for_ever(handle: FeatureStore = store) -> None:
        while True:
            _read(handle, blob_of, 8)

    for i in range(100):
        pid = _in_child(read_for_ever)
        time.sleep(i % 10 * 0.002)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before
    del store, read_for_ever
    newest = FeatureStore.open(copy)
    newest.append([{"key": "after", "blob": b"1"}])
    newest = newest.refresh()
    newest.gc(grace_s=0, keep_last=1)
    assert len(list((copy / "snapshots").iterdir())) <= 3  # The newest, the tagged, the one just left.
    _read(newest, blob_of, 8)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_view_and_a_store_travel_to_other_processes(copy, method):
    store = FeatureStore.open(copy, verify="always")
    view = store.select("number >= 20")
    store.append([{"key": "new", "number": 99}])
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(len, (view,)) == 10
        assert pool.apply(type(view).keys, (view,)) == [f"k{i}" for i in range(20, 30)]
        assert pool.apply(type(store).row, (store, "k7")) == 7
    again = pickle.loads(pickle.dumps(view))  # noqa: S301
    assert again.snapshot_id == 3 and again.store.policy == "always"


def test_two_lmdb_environments_of_one_path(copy, blob_of):
    """Somebody may have the database open with LMDB, in this process too; the store does not notice."""
    store = FeatureStore.open(copy)
    folder = str((copy / store.snapshot.parts[0].blobs.path).parent)
    with lmdb.open(folder, readonly=True, lock=False) as env, env.begin() as transaction:
        twin = FeatureStore.open(copy)
        assert transaction.get(b"k3") == blob_of(3)
        _read(store, blob_of, 3)
        _read(twin, blob_of, 4)
        assert _wait(_in_child(lambda: _read(twin, blob_of, 8))) == 0
    _read(store, blob_of, 9)


@pytest.mark.parametrize("length", [1, 510, 511, 512, 600, 70_000])
def test_keys_around_the_limits_of_lmdb(copy, length):
    """Two keys that differ only at their end, with and without blobs."""
    keys = ["x" * (length - 1) + end for end in "ab"] + ["é" * (length // 2) + "c"]
    with FeatureStore.open(copy).writer() as writer:
        for i, key in enumerate(keys):
            writer.add(key, key.encode() if i != 1 else None)
    store = FeatureStore.open(copy)
    for i, key in enumerate(keys):
        assert store.row(key) == 30 + i and store.key(30 + i) == key
        if i != 1:
            assert store.blob(30 + i) == key.encode()
    store.compact(max_part_bytes=1)
    store.delete(f"row = {store.row(keys[0])}")
    store.refresh().compact()
    assert store.refresh().row(keys[2]) == 32
    with pytest.raises(StorageError):
        store.refresh().row(keys[0])


@pytest.mark.parametrize(
    "key", ["", b"bytes", b"\xff\xfe", "\udcff", os.fsdecode(b"name \xe9"), 7, None, ("a",)]
)
def test_a_key_that_is_none(copy, key):
    store = FeatureStore.open(copy)
    with store.writer() as writer:
        with pytest.raises(StorageError, match="key"):
            writer.add(key, b"1")
        writer.add("good", b"2")
    assert len(store.refresh()) == 30
    with pytest.raises(StorageError, match="key"):
        store.row(key)
