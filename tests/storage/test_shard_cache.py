from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import xxhash

from storage import (
    CorruptionError,
    FeatureStore,
    ManifestError,
    MissingShardError,
    StorageError,
    StorageFullError,
)
from storage.backends import RemoteBackend, ShardCache
from storage.manifest import FileRef
from tests.contracts.web_server import serving

KB = 1 << 10


def shard(name: str, num_bytes: int = 10 * KB) -> tuple[FileRef, bytes]:
    content = (name.encode() * num_bytes)[:num_bytes]
    checksum = xxhash.xxh3_128_hexdigest(content)
    return FileRef(path=f"blobs/{name}", bytes=num_bytes, xxh3=checksum, rows=1), content


def whole(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        return file.read()


def ask(cache: ShardCache, name: str, num_bytes: int = 10 * KB) -> bool:
    """Open a shard; whether it had to be fetched."""
    ref, content = shard(name, num_bytes)
    fetched = []

    def fetch(target: Path) -> None:
        fetched.append(target)
        target.write_bytes(content)

    assert whole(cache.open("url", ref, fetch)) == content
    time.sleep(0.01)  # Times of change are steps of some milliseconds.
    return bool(fetched)


def held(cache: ShardCache) -> int:
    return sum(path.stat().st_size for path in (cache.folder / "shards").iterdir())


def test_what_was_not_asked_for_longest_goes_first(tmp_path):
    cache = ShardCache(tmp_path, max_bytes=32 * KB)
    assert [ask(cache, name) for name in "abcaad"] == [True, True, True, False, False, True]
    assert [ask(cache, name) for name in "acd"] == [False] * 3 and ask(cache, "b")
    assert held(cache) == 30 * KB and not list((tmp_path / "incoming").iterdir())


def test_a_shard_larger_than_the_cache_is_refused(tmp_path):
    cache = ShardCache(tmp_path, max_bytes=9 * KB)
    with pytest.raises(StorageError, match=r"10240 bytes.*may hold 9216.*UNIRL_CACHE_BYTES"):
        ask(cache, "a")


def test_settings_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("UNIRL_CACHE", str(tmp_path / "there"))
    monkeypatch.setenv("UNIRL_CACHE_BYTES", "20480")
    cache = ShardCache()
    assert (cache.folder, cache.max_bytes) == (tmp_path / "there", 20480)
    monkeypatch.setenv("UNIRL_CACHE_BYTES", "20 GB")
    with pytest.raises(StorageError, match="'20 GB' is not a number"):
        ShardCache()
    monkeypatch.delenv("UNIRL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ShardCache(max_bytes=1).folder == tmp_path / "unirl" / "shards"


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    cache = ShardCache(tmp_path)
    ask(cache, "a")
    status = namedtuple("status", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda path: status(5, KB))
    with pytest.raises(StorageFullError, match=r"needs 10240 bytes, 5120 are free.*UNIRL_CACHE"):
        ask(cache, "b")
    assert held(cache) == 0  # The rest was given up first.


def _fetch_slowly(folder: Path, names: list[str], downloads: Path) -> None:
    cache = ShardCache(folder, max_bytes=100 * KB)

    def ask_for_all(shift: int) -> None:
        for name in names[shift:] + names[:shift]:
            ref, content = shard(name)

            def fetch(target: Path, name: str = name, content: bytes = content) -> None:
                with downloads.open("a") as log:
                    log.write(f"{name}\n")
                time.sleep(0.02)
                target.write_bytes(content)

            assert whole(cache.open("url", ref, fetch)) == content

    threads = [threading.Thread(target=ask_for_all, args=(shift,)) for shift in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_processes_and_threads_download_a_shard_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    downloads = tmp_path / "downloads"
    arguments = (tmp_path / "cache", list("abcdefgh"), downloads)
    children = [context.Process(target=_fetch_slowly, args=arguments) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert sorted(downloads.read_text().split()) == list("abcdefgh")


def _hang_in_download(folder: Path, ready: object) -> None:
    cache = ShardCache(folder, max_bytes=32 * KB)
    ref, content = shard("a", 30 * KB)

    def fetch(target: Path) -> None:
        target.write_bytes(content[:100])
        ready.set()
        time.sleep(60)

    cache.open("url", ref, fetch)


def test_a_killed_download_leaves_nothing_in_the_way(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    child = context.Process(target=_hang_in_download, args=(tmp_path, ready))
    child.start()
    assert ready.wait(60)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    cache = ShardCache(tmp_path, max_bytes=32 * KB)
    assert len(list((tmp_path / "incoming").iterdir())) == 2
    assert ask(cache, "b") and not list((tmp_path / "incoming").iterdir())  # Its room is free again.
    assert ask(cache, "a", 30 * KB) and not ask(cache, "a", 30 * KB)


def test_a_path_stays_good_after_eviction_and_goes_with_the_process(tmp_path):
    cache = ShardCache(tmp_path, max_bytes=15 * KB)
    ref, content = shard("a")
    path = cache.path("url", ref, lambda target: target.write_bytes(content))
    ask(cache, "b")
    assert not cache.holds("url", ref) and path.read_bytes() == content
    sessions = tmp_path / "open"
    dead = sessions / "1-dead"
    dead.mkdir()
    (dead / "writer.lock").touch()
    ask(cache, "c")
    assert not dead.exists() and path.exists()
    del cache
    assert not list(sessions.iterdir())


@pytest.fixture
def served(tmp_path):
    """A store of three parts of 40 KB tensors behind a web server."""
    store = FeatureStore.create(tmp_path / "store")
    for part in range(3):
        rows = range(10 * part, 10 * part + 10)
        store.append(
            {"key": f"{i}", "blob": b"%d" % i * 99, "tensors": {"x": np.full(1024, i, np.int32)}}
            for i in rows
        )
    with serving(tmp_path) as server:
        yield server, store.refresh()


def remote(served, tmp_path, max_bytes=1 << 30) -> FeatureStore:
    return FeatureStore.open(
        RemoteBackend(f"{served[0].url}/store", ShardCache(tmp_path / "cache", max_bytes=max_bytes))
    )


def test_readers_outlive_eviction(served, tmp_path):
    store = remote(served, tmp_path, max_bytes=60 * KB)
    paths = [f"/store/{part.tensors['x'].path}" for part in store.snapshot.parts]
    column = store.tensor("x")
    views = [column[row : row + 5] for row in (0, 10, 20)]  # Each part throws the one before out.
    assert [view[0, 0] for view in views] == [0, 10, 20]
    assert column.gather(np.arange(30))[:, 7].tolist() == list(range(30))
    assert [view[4, 3] for view in views] == [4, 14, 24]
    assert [served[0].requests[path] for path in paths] == [2, 2, 2]
    assert column.gather(np.array([29, 28]))[:, 0].tolist() == [29, 28]
    assert served[0].requests[paths[2]] == 2
    assert len(store.select("key = '5'")) == 1 and len(store.select("key = '25'")) == 1


def test_a_shard_that_is_held_but_evicted_gives_private_views(served, tmp_path):
    store = remote(served, tmp_path, max_bytes=60 * KB)
    shard_of_0 = store.part(0).tensor("x", store.snapshot.tensors["x"])
    ask(store.backend.cache, "other", 30 * KB)
    assert not store.backend.cache.holds(store.url, store.snapshot.parts[0].tensors["x"])
    assert shard_of_0.array[3, 0] == 3  # The map lives on.
    assert shard_of_0.private(3, 4)[0, 0] == 3


def test_an_evicted_shard_is_unmapped(served, tmp_path):
    store = remote(served, tmp_path, max_bytes=60 * KB)
    for row in (0, 10, 20):
        store.tensor("x").gather(np.array([row]))
    mapped = [len(store.part(part)._tensors) for part in range(3)]
    assert mapped == [0, 0, 1]


def test_transient_errors_are_tried_again(served, tmp_path):
    server, store = served
    path = f"/store/{store.snapshot.parts[0].tensors['x'].path}"
    reader = remote(served, tmp_path)
    server.failures[path] = [503, 500]
    assert reader.tensor("x")[1:2][0, 0] == 1 and server.requests[path] == 3
    path = f"/store/{store.snapshot.parts[0].blobs.path}"
    server.failures[path] = [404]
    with pytest.raises(MissingShardError, match="the shard is missing"):
        reader.blob(0)
    server.failures[path] = [403]
    with pytest.raises(StorageError, match=r"refuses it.*storage_options"):
        reader.blob(0)
    assert reader.blob(0) == b"0" * 99 and server.requests[path] == 3


def test_a_server_that_is_gone_is_said_after_some_tries(tmp_path, monkeypatch):
    monkeypatch.setattr("storage.backends.transfer._FIRST_PAUSE_S", 0.001)
    with pytest.raises(StorageError, match="cannot be read after 5 tries"):
        FeatureStore.open("http://127.0.0.1:1/store")
    with pytest.raises(StorageError, match="Protocol not known"):
        FeatureStore.open("nonsense://a/b")
    with pytest.raises(StorageError, match="http://host/store: the URL of a store has no query"):
        FeatureStore.open("http://user:secret@host/store?token=secret")


@pytest.mark.parametrize("damage", ["flip", "cut", "grow"])
def test_a_damaged_shard_is_never_used(served, tmp_path, damage):
    _, store = served
    ref = store.snapshot.parts[1].tensors["x"]
    path = store.path / ref.path
    content = bytearray(path.read_bytes())
    content[ref.offset] ^= 1
    wrong = {"flip": content, "cut": content[:-1], "grow": content + b"1" * (8 << 20)}
    path.write_bytes(wrong[damage])
    reader = remote(served, tmp_path)
    with pytest.raises(CorruptionError, match=r"http://.*x.*(the snapshot says|more than the)"):
        reader.tensor("x").gather(np.array([15]))
    assert reader.tensor("x")[9:10][0, 0] == 9 and not list((tmp_path / "cache" / "incoming").iterdir())


def test_a_server_that_lists_nothing_tells_the_newest_by_the_hint(served, tmp_path):
    server, store = served
    server.lists = False
    assert remote(served, tmp_path).snapshot.id == 3
    store.tag("best")
    store.append([{"key": "new", "blob": b"1", "tensors": {"x": np.zeros(1024, np.int32)}}])
    (store.path / "newest-snapshot").write_text("2\n")  # As after a kill: the hint may be old.
    reader = remote(served, tmp_path)
    assert reader.snapshot.id == 4 and len(reader.at("best")) == 30 and len(reader.log()) == 5
    (store.path / "newest-snapshot").unlink()
    with pytest.raises(StorageError, match="has no file newest-snapshot; give the number"):
        remote(served, tmp_path)
    assert len(FeatureStore.open(reader.backend, snapshot=2)) == 20


def test_a_server_with_a_page_for_every_name_is_no_endless_store(served, tmp_path, monkeypatch):
    monkeypatch.setattr("storage.backends.transfer.RemoteFolder.names", lambda self, folder: [])
    monkeypatch.setattr(
        "storage.backends.transfer.RemoteFolder.read",
        lambda self, name: b"3\n" if name == "newest-snapshot" else b"<html>please log in</html>",
    )
    with pytest.raises(ManifestError, match=r"00000003\.json: the snapshot is cut short or damaged"):
        remote(served, tmp_path)


def test_shards_are_downloaded_before_they_are_asked_for(served, tmp_path):
    server, store = served
    reader = remote(served, tmp_path)
    reader.prefetch("x", blobs=True)
    paths = [f"/store/{ref.path}" for part in store.snapshot.parts for ref in (part.tensors["x"], part.blobs)]
    assert [server.requests[path] for path in paths] == [1] * 6
    server.failures = {path: [404] * 9 for path in paths}
    assert reader.tensor("x").gather(np.arange(30))[:, 0].tolist() == list(range(30)) and reader.blob(29)
