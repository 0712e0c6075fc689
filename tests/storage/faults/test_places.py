"""Where a store may lie, and what may happen to the place while it is open."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from storage import FeatureStore, MissingShardError, StorageError, StoreNotFoundError

NAMES = [
    "with space", "ünï-漢", "new\nline", "quo'te\"s", "a*b?c", "[v1]", "{x,y}", "semi;colon--", "%41", "~",
    "back\\slash", "-dash", "tab\t", "split=train/store", "x" * 200,
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_store_works_under_any_name(sealed, use_everything, tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    use_everything(FeatureStore.open(shutil.copytree(sealed, tmp_path / name)))


def test_a_path_that_is_no_text_is_refused_or_works(sealed, use_everything, tmp_path):
    path = tmp_path / os.fsdecode(b"raw \xff\xfe")
    shutil.copytree(sealed, path)
    try:
        store = FeatureStore.open(path)
    except StorageError as error:
        assert "UTF-8" in str(error)
    else:
        use_everything(store)


def test_a_very_long_path(sealed, use_everything, tmp_path):
    folder = tmp_path
    while len(str(folder)) < 2000:
        folder = folder / ("d" * 200)
    use_everything(FeatureStore.open(shutil.copytree(sealed, folder / "store")))


def test_a_relative_path_means_where_it_was_opened(copy, use_everything, tmp_path, monkeypatch):
    monkeypatch.chdir(copy.parent)
    store = FeatureStore.open("copy")
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    use_everything(store)
    assert not list(other.iterdir())


def test_a_linked_store_is_the_store(copy, use_everything, tmp_path):
    (tmp_path / "link").symlink_to(copy)
    linked = FeatureStore.open(tmp_path / "link")
    view = linked.tensor("x")[0:3]
    use_everything(linked)
    assert FeatureStore.open(copy).snapshot.id == linked.refresh().snapshot.id
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert view[:, 0].tolist() == [0, 1, 2] and linked.tensor("x")[1:2].any()
    with pytest.raises(StoreNotFoundError):
        linked.refresh()


def test_a_store_that_was_moved_while_it_was_open(copy, tmp_path):
    store = FeatureStore.open(copy)
    rows = np.arange(5)
    assert store.tensor("x").gather(rows)[4, 0] == 4 and store.blob(3)
    copy.rename(tmp_path / "moved")
    assert store.tensor("x").gather(rows)[4, 0] == 4 and store.blob(4)
    with pytest.raises(MissingShardError):
        store.tensor("x")[0:3]
    for act in (
        store.refresh,
        store.gc,
        store.compact,
        lambda: store.at(1),
        lambda: store.tag("late"),
        lambda: store.append([{"key": "late"}]),
        lambda: store.delete("number = 1"),
        lambda: store.blob(25),
        lambda: store.tensor("x").gather(np.array([25])),
        lambda: store.select("number = 25"),
        lambda: store.quarantined(),
    ):
        with pytest.raises(StorageError):
            act()
    assert not copy.exists()
    assert FeatureStore.open(tmp_path / "moved").verify().ok


def test_another_store_in_the_old_place_is_not_taken_for_the_first(copy, make_store, tmp_path):
    store = FeatureStore.open(copy)
    assert store.select().column("number")[3].as_py() == 3
    copy.rename(tmp_path / "moved")
    other = make_store(copy)
    assert other.row("k9") == 9
    for read in (lambda: store.blob(25), lambda: store.tensor("x")[20:22], lambda: store.key(25)):
        with pytest.raises(StorageError):
            read()


def test_copies_of_one_store_do_not_share_what_was_read(copy, tmp_path):
    """Both have the same part ids, names and sizes; only one of them is damaged."""
    twin = Path(shutil.copytree(copy, tmp_path / "twin"))
    for path in twin.rglob("*"):
        if path.suffix in (".mdb", ".arrow", ".parquet") and not path.name.startswith("deleted"):
            path.write_bytes(bytes(path.stat().st_size))
    whole, broken = FeatureStore.open(copy), FeatureStore.open(twin)
    reads = [
        lambda store: bytes(store.blob(7)),
        lambda store: store.tensor("x").gather(np.array([7, 22])).tolist(),
        lambda store: store.select().column("number").to_pylist(),
        lambda store: store.select("number > 7").rows.tolist(),
        lambda store: store.key(7),
        lambda store: store.row("k7"),
    ]
    for read in reads:
        expected = read(whole)
        with pytest.raises(StorageError):
            read(broken)
        assert read(whole) == expected


def test_a_shard_that_was_copied_back_is_read_again(copy, sealed):
    """Also while the handle that found the damage is still there, as in a notebook."""
    suffixes = (".mdb", ".arrow", ".parquet")
    names = [path.relative_to(copy) for path in copy.rglob("*") if path.suffix in suffixes]
    for name in names:
        (copy / name).write_bytes(bytes((copy / name).stat().st_size))
    store = FeatureStore.open(copy, snapshot=2)
    reads = [
        lambda store: bytes(store.blob(7)),
        lambda store: store.tensor("x")[7:8].tolist(),
        lambda store: store.select().column("number").to_pylist(),
        lambda store: store.key(7),
        lambda store: store.row("k7"),
    ]
    for read in reads:
        with pytest.raises(StorageError):
            read(store)
    for name in names:
        (copy / name).unlink()
        shutil.copy(sealed / name, copy / name)
    again, fresh = FeatureStore.open(copy, snapshot=2), FeatureStore.open(sealed, snapshot=2)
    for read in reads:
        assert read(again) == read(fresh)


def test_a_copy_without_its_empty_folders(sealed, use_everything, tmp_path):
    """What git, or a copy to a bucket and back, makes of a store."""
    for path in sealed.rglob("*"):
        if path.is_file():
            target = tmp_path / "copy" / path.relative_to(sealed)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    shutil.rmtree(tmp_path / "copy" / "tags")
    store = FeatureStore.open(tmp_path / "copy")
    assert store.tags() == {}
    store.gc(grace_s=0)
    store.tag("v1", 2)
    store.restore(2)
    store.restore(3)
    use_everything(store)


def test_a_private_umask(sealed, use_everything, make_store, tmp_path):
    before = os.umask(0o077)
    try:
        use_everything(make_store(tmp_path / "private"))
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "private").rglob("*")}
    assert modes == {0}


def test_file_times_that_lie_in_the_future_or_the_past(copy, use_everything):
    """Nothing is decided by the times that a file can be given, so a wrong clock loses nothing."""
    for number, path in enumerate(copy.rglob("*")):
        os.utime(path, (0, 0) if number % 2 else (4e9, 4e9))
    before = {path for path in copy.rglob("*") if path.is_file()}
    FeatureStore.open(copy).gc(grace_s=3600)
    assert {path for path in copy.rglob("*") if path.is_file()} == before
    use_everything(FeatureStore.open(copy))


@pytest.mark.parametrize("shift", [-10 * 365 * 86400, 10 * 365 * 86400])
def test_a_clock_that_is_years_off_removes_nothing_that_is_listed(copy, use_everything, monkeypatch, shift):
    import time

    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() + shift)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + shift * 10**9)
    store = FeatureStore.open(copy)
    with store.writer() as writer:
        writer.add("slow", b"1", {"x": np.zeros(4, np.int32)}, number=ROWS_ABOVE)
        store.gc()
    assert store.refresh().verify().ok
    store.delete(f"number = {ROWS_ABOVE}")
    use_everything(store)


ROWS_ABOVE = 1000
