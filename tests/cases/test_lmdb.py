"""Field cases of LMDB: a full map, reader slots, forks, paths opened twice, full disks, several writers."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import lmdb
import numpy as np
import pytest

from datapipe import StoreBusyError, ingest
from storage import CommitConflictError, FeatureStore, StorageError, StorageFullError
from storage.blobs import BlobWriter
from tools.soak.small_disk import mount_small_disk, only_bytes_free


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


def _append_in_little_address_space(path) -> None:
    size = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (size + (500 << 20), size + (500 << 20)))
    blob = os.urandom(1 << 20)
    FeatureStore.open(path).append({"key": f"big{i}", "blob": blob[i:]} for i in range(100))


def test_lmdb_01_the_map_grows_within_a_limited_address_space(store):
    """No map of a terabyte is asked for: one of some hundred megabytes is enough for a hundred."""
    child = multiprocessing.get_context("fork").Process(
        target=_append_in_little_address_space, args=(store.path,)
    )
    child.start()
    child.join()
    assert child.exitcode == 0 and len(store.refresh().blob(149)) == (1 << 20) - 99


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


class _Samples:
    """What a user writes around a store."""

    def __init__(self, store: FeatureStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, row: int) -> tuple[bytes, int]:
        return _read(self.store, row)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_lmdb_03_the_workers_of_a_data_loader(store, method):
    from torch.utils.data import DataLoader

    samples = _Samples(store)
    assert samples[4] == (b"4" * 500, 10)
    loader = DataLoader(
        samples, batch_size=10, num_workers=2, multiprocessing_context=method, collate_fn=list
    )
    for _ in range(2):
        assert [blob for batch in loader for blob, _ in batch] == [b"%d" % row * 500 for row in range(50)]
    assert samples[5] == (b"5" * 500, 10)


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


def _append_until_full(folder: Path, has_disk: bool, connection) -> None:
    if has_disk:
        assert mount_small_disk(folder, 4 << 20, 1000)
    store = FeatureStore.create(folder / "store")
    store.append({"key": f"k{i}", "blob": b"%d" % i * 500} for i in range(50))
    with ExitStack() as limit:
        if not has_disk:
            limit.enter_context(only_bytes_free(folder, 1 << 20, mounted=False))
        with pytest.raises(StorageFullError) as caught:
            store.append({"key": f"x{i}", "blob": os.urandom(1 << 16)} for i in range(128))
    newest = store.refresh()
    assert newest.snapshot.id == 1 and newest.verify().ok
    assert newest.gc(grace_s=0).removed == [] and not list((newest.path / "staging").iterdir())
    newest.append([{"key": "fits", "blob": b"1"}])
    assert newest.refresh().blob(7) == b"7" * 500 and newest.refresh().blob(50) == b"1"
    connection.send(str(caught.value))


@pytest.mark.parametrize("has_disk", [True, False])
def test_lmdb_07_a_full_disk_is_an_error_and_keeps_the_last_commit(tmp_path, has_disk):
    """A disk of 4 MB, 8 MB of blobs; and a limit on file sizes, which any user may set."""
    if has_disk and not _may_mount(tmp_path):
        has_disk = False
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_append_until_full, args=(tmp_path, has_disk, theirs))
    child.start()
    theirs.close()
    text = mine.recv()
    child.join()
    assert child.exitcode == 0
    assert re.search(r"the disk is full .*: \d+ bytes were written .*, \d+ bytes are free", text)


def _may_mount(folder: Path) -> bool:
    child = multiprocessing.get_context("fork").Process(target=_mount_or_fail, args=(folder,))
    child.start()
    child.join()
    return child.exitcode == 0


def _mount_or_fail(folder: Path) -> None:
    os._exit(0 if mount_small_disk(folder, 1 << 20, 10) else 1)


def test_lmdb_08_a_network_folder_is_written_to_only_when_that_is_asked_for(store, monkeypatch, tmp_path):
    """Its locks may not be seen by other machines; the mount table says which folder is one."""
    mounts = tmp_path / "mountinfo"
    parent = str(store.path.parent).replace(" ", "\\040")
    mounts.write_text(f"1 0 0:1 / / rw - ext4 /dev/vda rw\n2 1 0:2 / {parent} rw - nfs4 host:/share rw\n")
    monkeypatch.setattr("storage.backends.network.MOUNTS", mounts)
    monkeypatch.delenv("UNIRL_ALLOW_NETWORK_FS", raising=False)
    remote = FeatureStore.open(store.path)
    assert remote.blob(7) == b"7" * 500 and remote.row("k9") == 9 and remote.verify().ok
    for act in (
        lambda: remote.append([{"key": "new"}]),
        lambda: remote.delete("n = 1"),
        lambda: remote.tag("v1"),
        lambda: remote.gc(grace_s=0),
        lambda: FeatureStore.create(store.path.parent / "other"),
    ):
        with pytest.raises(StorageError, match=r"network file system .*UNIRL_ALLOW_NETWORK_FS"):
            act()
    monkeypatch.setenv("UNIRL_ALLOW_NETWORK_FS", "1")
    forced = FeatureStore.open(store.path)
    forced.append([{"key": "new", "blob": b"1"}])
    assert forced.refresh().blob(50) == b"1" and forced.refresh().verify().ok


def test_lmdb_08_two_runs_of_one_computation_do_not_meet(store):
    """The second ends with a message that says who holds the lock, and the first is not disturbed."""

    def compute(view):
        if compute.is_first:
            compute.is_first = False
            with pytest.raises(CommitConflictError, match="another run computes tensor 'y'"):
                FeatureStore.open(store.path).add_column("y", compute, dtype="int64", shape=())
        return view.rows

    compute.is_first = True
    store.add_column("y", compute, dtype="int64", shape=())
    assert store.refresh().tensor("y").gather(np.arange(50)).tolist() == list(range(50))


INGEST = textwrap.dedent(
    """
    import sys, time
    from datapipe import ingest

    def wait():
        print("holding", flush=True)
        time.sleep(60)
        return False

    ingest(sys.argv[1], sys.argv[2], optional=["image"], commit_rows=1, should_stop=wait)
    """
)


def test_lmdb_08_a_second_ingest_ends_with_a_lock_message(tmp_path):
    """It names the first one and leaves it alone; a killed one leaves no lock behind."""
    store, table = tmp_path / "store", tmp_path / "prompts.jsonl"
    table.write_text("".join(json.dumps({"key": str(n), "caption": f"prompt {n}"}) + "\n" for n in range(20)))
    first = subprocess.Popen(
        [sys.executable, "-c", INGEST, str(table), str(store)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout is not None and first.stdout.readline() == "holding\n"
        script = "from unirl.cli.data import data_app; data_app()"
        command = [sys.executable, "-c", script, "ingest", str(table), str(store), "--optional", "image"]
        second = subprocess.run(command, capture_output=True, text=True, check=False)
        assert second.returncode == 2
        assert f"{store}: process {first.pid} on " in second.stderr and "Traceback" not in second.stderr
        assert second.stderr.count("\n") == 1
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            ingest(table, store, optional=["image"])
            break
        except StoreBusyError:
            time.sleep(0.05)
    assert len(FeatureStore.open(store)) == 20


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
