"""Stores on network file systems: refused unless allowed, and then safe for several machines."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
from pathlib import Path

import lmdb
import numpy as np
import pytest

from storage import DuplicateKeyError, FeatureStore, StorageError
from storage.backends import network
from storage.backends.network import network_file_system


@pytest.fixture
def nfs(tmp_path, monkeypatch):
    """A folder that the table of mounts calls a network folder."""
    folder = tmp_path / "shared folder"
    folder.mkdir()
    mounts = tmp_path / "mountinfo"
    point = str(folder).replace(" ", r"\040")
    mounts.write_text(
        f"21 1 0:1 / / rw,relatime - ext4 /dev/a rw\n22 21 0:2 / {point} rw shared:1 - nfs4 host:/x rw\n"
    )
    monkeypatch.setattr(network, "MOUNTS", mounts)
    return folder


def test_the_mount_that_holds_a_folder_is_found(nfs, tmp_path, monkeypatch):
    assert network_file_system(nfs) == network_file_system(nfs / "a" / "b") == "nfs4"
    assert network_file_system(tmp_path) is None and network_file_system(Path(f"{nfs}x")) is None
    (tmp_path / "link").symlink_to(nfs)
    assert network_file_system(tmp_path / "link") == "nfs4"
    with network.MOUNTS.open("a") as mounts:
        mounts.write(
            f"23 22 0:3 / {str(nfs)!s}/local rw - tmpfs x rw\n".replace("shared folder", r"shared\040folder")
        )
    assert network_file_system(nfs / "local" / "a") is None
    monkeypatch.setattr(network, "MOUNTS", tmp_path / "nothing")
    assert network_file_system(nfs) is None


def test_writing_is_refused_unless_allowed(nfs, monkeypatch):
    with pytest.raises(StorageError, match=r"nfs4.*allow_network_fs=True or set UNIRL_ALLOW_NETWORK_FS=1"):
        FeatureStore.create(nfs / "store")
    assert not (nfs / "store").exists()
    FeatureStore.create(nfs / "store", allow_network_fs=True).append([{"key": "a", "blob": b"1"}])
    store = FeatureStore.open(nfs / "store")
    assert store.blob(0) == b"1"
    for change in (
        lambda: store.append([{"key": "b"}]),
        lambda: store.delete("true"),
        lambda: store.tag("x"),
        lambda: store.gc(),
    ):
        with pytest.raises(StorageError, match="network file system"):
            change()
    monkeypatch.setenv("UNIRL_ALLOW_NETWORK_FS", "1")
    FeatureStore.open(nfs / "store").append([{"key": "b"}])
    with pytest.raises(StorageError, match="network file system"):
        FeatureStore.open(nfs / "store", allow_network_fs=False).tag("x")


def test_lmdb_never_writes_there(nfs, monkeypatch, tmp_path):
    opened = []
    real_open = lmdb.open

    def spy(path, *arguments, **options):
        opened.append(Path(path))
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(lmdb, "open", spy)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = FeatureStore.create(nfs / "store", allow_network_fs=True)
    with store.writer() as writer:
        writer.add("a", b"1" * 10_000, {"x": np.arange(3)})
        assert [path.name for path in (nfs / "store" / "staging").glob("*/*")] == ["writer.lock"]
    store = store.refresh()
    assert opened and not any(path.is_relative_to(nfs) for path in opened)
    assert store.verify().ok and store.blob(0) == b"1" * 10_000
    assert not list((nfs / "store" / "staging").iterdir()) and not list(tmp_path.glob("store-*"))


def _no_locks(*arguments: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def _another_machine(path: Path, mounts: Path, name: str, commits: int, results: object) -> None:
    network.MOUNTS = mounts
    fcntl.flock = _no_locks
    store = FeatureStore.open(path, allow_network_fs=True)
    for commit in range(commits):
        rows = [
            {"key": f"{name} {commit} {i}", "blob": b"%d" % i, "tensors": {"x": np.full(3, i)}, "n": i}
            for i in range(5)
        ]
        store.append(rows, f"{name} {commit}")
    store.add_column(name, lambda view: view.rows, dtype="int64", shape=())
    try:
        store.append([{"key": "both want it", "blob": b"1", "tensors": {"x": np.zeros(3, int)}, "n": 0}])
        results.put((name, "won"))
    except DuplicateKeyError:
        results.put((name, "lost"))


def test_two_machines_without_locks_lose_nothing(nfs):
    path = FeatureStore.create(nfs / "store", allow_network_fs=True).path
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    machines = [
        context.Process(target=_another_machine, args=(path, network.MOUNTS, name, 6, results))
        for name in "ab"
    ]
    for machine in machines:
        machine.start()
    outcomes = dict(results.get(timeout=120) for _ in machines)
    for machine in machines:
        machine.join()
        assert machine.exitcode == 0
    assert sorted(outcomes.values()) == ["lost", "won"]
    store = FeatureStore.open(path, verify="always")
    assert store.verify().ok and len(store) == 61 and len(store.log()) == 16
    wanted = {f"{name} {commit} {i}" for name in "ab" for commit in range(6) for i in range(5)}
    assert set(store.query("SELECT key FROM samples").column(0).to_pylist()) - {"both want it"} == wanted
    for name in "ab":
        view = store.select(f"key LIKE '{name} %'")
        assert store.tensor("x").gather(view.rows)[:, 0].tolist() == view.column("n").to_pylist()


def test_without_locks_gc_has_the_grace_period(nfs, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", _no_locks)
    store = FeatureStore.create(nfs / "store", allow_network_fs=True)
    with store.writer() as writer:
        writer.add("a", b"1")
        assert store.gc(grace_s=3600).removed == []
    store = store.refresh()
    assert store.blob(0) == b"1" and store.gc(grace_s=0).removed == [] and store.verify().ok


def test_a_publication_whose_answer_was_lost_is_recognised(tmp_path, monkeypatch):
    store = FeatureStore.create(tmp_path / "store")
    real_link = os.link

    def link_twice(*arguments, **options):
        real_link(*arguments, **options)
        real_link(*arguments, **options)

    monkeypatch.setattr(os, "link", link_twice)
    assert store.append([{"key": "a", "blob": b"1"}]).id == 1
    assert [snapshot.num_rows for snapshot in store.refresh().snapshots()] == [0, 1]


def test_a_file_system_without_hard_links_is_said(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageError, match="has no hard links"):
        FeatureStore.create(tmp_path / "store")
