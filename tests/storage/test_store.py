from __future__ import annotations

import multiprocessing
import pickle
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from storage import (
    DuplicateKeyError,
    FeatureStore,
    KeyNotFoundError,
    RowNotFoundError,
    SnapshotNotFoundError,
    StorageError,
    StoreExistsError,
    StoreNotFoundError,
    View,
)


def test_rows_come_back(filled, blob_of, codes_of):
    assert len(filled) == 100
    for i in (0, 59, 60, 99):
        row = filled.row(f"k{i:05d}")
        assert row == i
        assert filled.key(row) == f"k{i:05d}"
        assert filled.blob(row) == blob_of(i)
        assert np.array_equal(filled.tensor("codes").gather(np.array([row]))[0], codes_of(i))
    table = filled.select("width = 63").to_arrow()
    assert table.to_pylist()[0]["caption"] == "sample 63"
    assert table["bytes"].to_pylist() == [len(blob_of(63))]


def test_a_handle_keeps_its_snapshot(filled, filler):
    view = filled.select("split = 'train'")
    newer = filler(filled, 100, 110)
    assert (len(filled), len(newer)) == (100, 110)
    assert len(filled.select()) == 100
    assert FeatureStore.open(filled.path, snapshot=1).select().keys()[-1] == "k00059"
    assert view.snapshot_id == 2 and len(view) == 50
    assert [s.num_rows for s in newer.snapshots()] == [0, 60, 100, 110]


def test_create_refuses_what_is_there(filled, tmp_path):
    with pytest.raises(StoreExistsError, match="exist_ok"):
        FeatureStore.create(filled.path)
    assert len(FeatureStore.create(filled.path, exist_ok=True)) == 100
    foreign = tmp_path / "pictures"
    foreign.mkdir()
    (foreign / "cat.jpg").write_bytes(b"x")
    with pytest.raises(StoreExistsError, match=r"cat\.jpg"):
        FeatureStore.create(foreign)
    with pytest.raises(StoreExistsError, match="file of this name"):
        FeatureStore.create(foreign / "cat.jpg")


def test_create_finishes_a_killed_create(tmp_path):
    (tmp_path / "s" / "snapshots").mkdir(parents=True)
    (tmp_path / "s" / "staging").mkdir()
    assert len(FeatureStore.create(tmp_path / "s")) == 0


def test_a_folder_of_stores_names_them(tmp_path):
    for name in ("store", "experience"):
        FeatureStore.create(tmp_path / "run" / name)
    with pytest.raises(StoreNotFoundError, match=r"did you mean \S*/run/experience or \S*/run/store\?"):
        FeatureStore.open(tmp_path / "run")


def test_wrong_path_names_the_nearest_store(filled):
    with pytest.raises(StoreNotFoundError, match=r"did you mean .*store"):
        FeatureStore.open(filled.path.parent / "stor")
    with pytest.raises(FileNotFoundError, match="not a feature store"):
        FeatureStore.open(filled.path / "index")
    with pytest.raises(SnapshotNotFoundError, match="0 to 2"):
        FeatureStore.open(filled.path, snapshot=7)
    with pytest.raises(StorageError, match="first-read, always, never"):
        FeatureStore.open(filled.path, verify="sometimes")


def test_unknown_keys_and_rows(filled):
    with pytest.raises(KeyNotFoundError, match="k00012"):
        filled.row("k000123")
    with pytest.raises(KeyError):
        filled.row("it's not \0 there")
    for row in (-1, 100, 10**12):
        with pytest.raises(RowNotFoundError):
            filled.key(row)
        with pytest.raises(RowNotFoundError):
            filled.tensor("codes").gather(np.array([0, row]))


@pytest.mark.parametrize(
    "key", ["a", "x" * 511, "x" * 512, "x" * 600, "é" * 300, "日本/\n\0'\"", " ", "\x7f" * 5000]
)
def test_keys_of_any_kind(empty, key):
    store = empty
    store.append([{"key": key, "blob": b"payload"}, {"key": key + "2", "blob": b"other"}])
    store = store.refresh()
    assert store.blob(store.row(key)) == b"payload"
    assert store.select().keys() == [key, key + "2"]
    assert store.query("SELECT key FROM samples").column(0).to_pylist() == [key, key + "2"]
    with pytest.raises(DuplicateKeyError, match="row 0 of"):
        store.append([{"key": key}])


def test_keys_that_are_none(empty):
    for key in ("", None, 3, b"bytes", "\ud800"):
        with pytest.raises(StorageError, match="key"):
            empty.append([{"key": key}])
    assert empty.refresh().snapshot.id == 0


def test_duplicate_names_both_places(filled):
    with pytest.raises(DuplicateKeyError, match=r"row 1 of the commit.*row 0 of the same commit"):
        filled.append([{"key": "new"}, {"key": "new"}])
    with pytest.raises(DuplicateKeyError, match=r"row 0 of the commit.*row 77 of .*store \(snapshot 2\)"):
        filled.append([{"key": "k00077"}])
    assert filled.refresh().snapshot.id == 2
    assert not list((filled.path / "staging").iterdir())


def test_a_refused_row_leaves_the_commit_usable(filled):
    with filled.writer() as writer:
        writer.add("good", b"1", width=1)
        for bad in ({"key": "k00001"}, {"key": "bad", "width": "wide"}, {"key": "bad", "key_": object()}):
            with pytest.raises(StorageError):
                writer.add(**bad)
        writer.quarantine(key="k00001", place="x.tar:7", reason="duplicate", data=b"\0raw")
        writer.add("fine", b"2", width=2)
    store = filled.refresh()
    assert store.select("key in ('good', 'fine')").keys() == ["good", "fine"]
    assert store.quarantined().to_pylist() == [
        {"key": "k00001", "place": "x.tar:7", "reason": "duplicate", "data": b"\0raw"}
    ]


@pytest.mark.parametrize("blob", ["text", 5, [1], Path("x")], ids=["str", "int", "list", "path"])
def test_what_is_no_bytes_is_refused_and_leaves_the_commit_usable(empty, blob):
    with empty.writer() as writer:
        writer.add("a", b"1")
        with pytest.raises(StorageError, match=r"row 1 of the commit, key 'b': the blob is .* bytes"):
            writer.add("b", blob)
        writer.add("b", b"2")
    store = empty.refresh()
    assert [store.blob(0), store.blob(1)] == [b"1", b"2"]


def test_a_blob_too_large_for_lmdb_leaves_the_commit_usable(empty, monkeypatch):
    monkeypatch.setattr("storage.blobs._MAX_BLOB_BYTES", 10)
    with empty.writer() as writer:
        with pytest.raises(StorageError, match="key 'a': a blob of 11 bytes is too large"):
            writer.add("a", b"1" * 11)
        writer.add("a", b"1")
    assert empty.refresh().blob(0) == b"1"


def test_a_buffer_may_be_used_again_for_the_next_row(empty):
    buffer = bytearray(100)
    with empty.writer() as writer:
        for i in range(200):
            buffer[:] = bytes([i]) * 100
            writer.add(str(i), buffer if i % 2 else memoryview(buffer)[::2])
    store = empty.refresh()
    assert all(store.blob(i) == bytes([i]) * (100 if i % 2 else 50) for i in range(200))


@pytest.mark.parametrize("message", [None, 5, "\ud800"], ids=["none", "number", "surrogate"])
def test_a_message_that_is_no_text_is_refused_before_anything_is_written(filled, message):
    with pytest.raises(StorageError, match="nothing was committed, as nobody could read it"):
        filled.writer(message=message)
    assert not list((filled.path / "staging").iterdir())
    if message is not None:
        for change in (lambda: filled.delete("true", message), lambda: filled.compact(message=message)):
            with pytest.raises(StorageError, match="nothing was committed"):
                change()
    copy = shutil.copytree(filled.path, filled.path.with_name("copy"))
    assert len(FeatureStore.open(copy)) == 100  # Read from its file, not remembered.


def test_an_error_discards_the_commit(filled):
    with pytest.raises(RuntimeError), filled.writer() as writer:
        writer.add("lost", b"1")
        raise RuntimeError
    assert filled.refresh().snapshot.id == 2
    assert filled.verify().ok and filled.gc(grace_s=0).removed == []
    with pytest.raises(StorageError, match="closed"):
        writer.add("late")


def test_an_empty_commit_publishes_nothing(filled):
    assert filled.append([]).id == 2
    with filled.writer() as writer:
        writer.quarantine(key="", place="a", reason="b")
    assert writer.snapshot.id == 3 and writer.snapshot.num_rows == 100


def test_blobs_are_optional_and_may_be_empty(empty):
    empty.append([{"key": "none"}, {"key": "zero", "blob": b""}, {"key": "view", "blob": memoryview(b"abc")}])
    store = empty.refresh()
    assert store.blob(1) == b"" and store.blob(2) == b"abc"
    with pytest.raises(StorageError, match="no blob"):
        store.blob(0)
    assert store.query("SELECT bytes FROM samples").column(0).to_pylist() == [None, 0, 3]


def test_restore_brings_rows_back_under_new_numbers(filled, filler):
    restored = filled.restore(1)
    assert (restored.id, restored.parent, restored.num_rows, restored.next_row) == (3, 2, 60, 100)
    store = filler(filled, 60, 65)
    assert store.select().rows[-5:].tolist() == [100, 101, 102, 103, 104]
    assert store.select("width >= 60").keys() == [f"k{i:05d}" for i in range(60, 65)]
    assert len(FeatureStore.open(filled.path, snapshot=2)) == 100


def test_pickle_and_views(filled):
    view = filled.select("width % 10 = 3", order_by="width DESC")
    copy = pickle.loads(pickle.dumps(view))  # noqa: S301
    assert isinstance(copy, View) and copy.keys() == view.keys() and copy.snapshot_id == 2
    assert len(pickle.dumps(view)) < 1000
    assert view[2:4].keys() == ["k00073", "k00063"]
    assert view[np.array([9, 0])].column("width").to_pylist() == [3, 93]
    assert view[[1]].keys() == ["k00083"]
    assert pickle.loads(pickle.dumps(filled)).snapshot == filled.snapshot  # noqa: S301


def _read_in_child(store: FeatureStore, connection) -> None:
    rows = store.select("split = 'eval'").rows
    connection.send((len(rows), bytes(store.blob(5)), store.tensor("codes").gather(rows[:3]).tolist()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_reading_goes_on_in_children(filled, method, blob_of, codes_of):
    filled.blob(5)
    filled.select("split = 'train'")
    context = multiprocessing.get_context(method)
    mine, theirs = context.Pipe()
    child = context.Process(target=_read_in_child, args=(filled, theirs))
    child.start()
    assert mine.recv() == (50, blob_of(5), [codes_of(i).tolist() for i in (0, 2, 4)])
    child.join()
    assert filled.blob(7) == blob_of(7) and len(filled.select("split = 'eval'")) == 50


def test_threads_share_a_handle(filled, blob_of):
    failures = []

    def read(seed: int) -> None:
        for i in np.random.default_rng(seed).integers(0, 100, 20).tolist():
            if filled.blob(i) != blob_of(i) or filled.select(f"width = {i}").rows.tolist() != [i]:
                failures.append(i)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_relative_and_linked_paths_open_the_same_store(filled, monkeypatch, blob_of):
    link = filled.path.parent / "link"
    link.symlink_to(filled.path)
    monkeypatch.chdir(filled.path.parent)
    stores = [FeatureStore.open("store"), FeatureStore.open(link), FeatureStore.open(filled.path)]
    assert [s.blob(3) for s in stores] == [blob_of(3)] * 3
    first = stores.pop(0)
    del first
    assert stores[0].blob(4) == blob_of(4)


def test_a_store_moves(filled, tmp_path, blob_of):
    moved = tmp_path / "elsewhere" / "s"
    moved.parent.mkdir()
    filled.path.rename(moved)
    assert FeatureStore.open(moved).blob(9) == blob_of(9)


def test_no_file_descriptor_stays_open(filled):
    before = len(list(Path("/proc/self/fd").iterdir()))
    blobs = [filled.blob(i) for i in range(100)]
    views = [filled.tensor("codes")[i : i + 1] for i in range(100) if i != 60]
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    assert len(blobs) + len(views) == 199


def test_a_store_that_cannot_be_written_is_readable_and_says_so(filled):
    staging = filled.path / "staging"
    staging.rmdir()
    staging.write_bytes(b"")
    assert len(FeatureStore.open(filled.path)) == 100
    with pytest.raises(StorageError, match="cannot be written to"):
        filled.append([{"key": "x"}])
