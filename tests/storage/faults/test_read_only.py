"""A store that this user may not write to: all reading works, all writing is refused in plain words."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from storage import FeatureStore, StorageError
from tools.soak.small_disk import mount_read_only

_NOBODY = 65534


def _become_nobody(folder: Path) -> None:
    """Permission bits do not bind root."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)


def _mount_read_only(folder: Path) -> None:
    if not mount_read_only(folder):
        _become_nobody(folder)


def _try_everything(folder: Path, deny: Callable[[Path], None], connection) -> None:
    path = folder / "store"
    (path / "index" / "part-dead.parquet").write_bytes(b"left behind")
    _read(FeatureStore.open(path))
    deny(folder)
    store = FeatureStore.open(path, verify="always")
    _read(store)
    accepted, raw = [], []
    for name, act in {
        "append": lambda: store.append([{"key": "new", "blob": b"1"}]),
        "add_column": lambda: store.add_column("y", lambda view: view.rows, dtype="int64", shape=()),
        "delete": lambda: store.delete("number = 1"),
        "compact": lambda: store.compact(),
        "drop": lambda: store.drop_column("split"),
        "rename": lambda: store.rename_column("split", "fold"),
        "tag": lambda: store.tag("late"),
        "untag": lambda: store.untag("v1"),
        "restore": lambda: store.restore(1),
        "gc": lambda: store.gc(grace_s=0),
        "create": lambda: FeatureStore.create(folder / "other"),
    }.items():
        try:
            act()
        except StorageError as error:
            if "written" not in str(error) and "removed" not in str(error):
                raw.append(f"{name}: {error}")
        except OSError as error:
            raw.append(f"{name}: {error!r}")
        else:
            accepted.append(name)
    connection.send((accepted, raw, len(store.refresh())))


def _read(store: FeatureStore) -> None:
    assert store.blob(3) and store.row("k7") == 7 and store.tags() == {"v1": 2}
    assert store.tensor("x")[3:5][:, 0].tolist() == [3, 4]
    assert store.tensor("x").gather(np.array([22]))[0, 0] == 22
    assert store.select("number = 3").column("split").to_pylist() == ["a"]
    assert store.quarantined().num_rows == 2 and store.verify().ok


@pytest.mark.parametrize("deny", [_become_nobody, _mount_read_only])
def test_a_store_that_may_only_be_read(sealed, deny):
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        shutil.copytree(sealed, folder / "store")
        mine, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(
            target=_try_everything, args=(folder, deny, theirs)
        )
        child.start()
        theirs.close()
        accepted, raw, rows = mine.recv()
        child.join()
    finally:
        for path in folder.rglob("*"):
            path.chmod(0o755)
        shutil.rmtree(folder)
    assert accepted == [] and raw == [] and rows == 29


def _find_store(path: Path, connection) -> None:
    _become_nobody(path.parent / "empty")
    try:
        FeatureStore.open(path)
    except StorageError as error:
        connection.send(str(error))


def test_a_neighbour_that_may_not_be_entered_does_not_hide_what_is_missing():
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        (folder / "closed").mkdir(mode=0o700)
        (folder / "empty").mkdir()
        mine, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(
            target=_find_store, args=(folder / "clsed", theirs)
        )
        child.start()
        theirs.close()
        text = mine.recv()
        child.join()
    finally:
        shutil.rmtree(folder)
    assert "there is no such folder" in text
