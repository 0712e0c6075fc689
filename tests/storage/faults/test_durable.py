"""What a power cut would leave: all that a snapshot lists is synced before the snapshot gets its name."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from storage import FeatureStore


class _Journal:
    """Syncs, renames and links of this process, in order, by the number of the file."""

    def __init__(self, monkeypatch) -> None:
        self.synced: dict[tuple[int, int], int] = {}
        self.named: dict[str, int] = {}
        self.published: list[tuple[str, int]] = []
        self._time = 0
        fsync, rename, link = os.fsync, Path.rename, os.link

        def record_sync(fd: int) -> None:
            fsync(fd)
            status = os.fstat(fd)
            self.synced[status.st_dev, status.st_ino] = self._tick()

        def record_rename(source: Path, target: Path) -> Path:
            done = rename(source, target)
            self.named[str(target)] = self._tick()
            return done

        def record_link(source, target, **options) -> None:
            link(source, target, **options)
            self.published.append((str(target), self._tick()))

        monkeypatch.setattr(os, "fsync", record_sync)
        monkeypatch.setattr(Path, "rename", record_rename)
        monkeypatch.setattr(os, "link", record_link)

    def _tick(self) -> int:
        self._time += 1
        return self._time

    def synced_at(self, path: Path) -> int:
        status = path.stat()
        return self.synced.get((status.st_dev, status.st_ino), -1)


CHANGES = {
    "append": lambda store: store.append(
        [{"key": "new", "blob": b"1", "tensors": {"x": np.zeros(4, np.int32)}, "number": 99}]
    ),
    "add_column": lambda store: store.add_column("y", lambda view: view.rows, dtype="int64", shape=()),
    "delete": lambda store: store.delete("number = 7"),
    "compact": lambda store: store.compact(),
    "rename": lambda store: store.rename_column("split", "fold"),
    "tag": lambda store: store.tag("late"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_and_their_names_are_synced_before_they_are_published(copy, monkeypatch, change):
    store = FeatureStore.open(copy)
    before = {path for path in copy.rglob("*") if path.is_file()}
    journal = _Journal(monkeypatch)
    CHANGES[change](store)
    ((published, at),) = [entry for entry in journal.published if entry[0].startswith(str(copy))]
    assert 0 < journal.synced_at(Path(published)) < at
    assert journal.synced_at(Path(published).parent) > at
    new = {path for path in copy.rglob("*") if path.is_file()} - before
    for path in new - {Path(published), copy / "newest-snapshot"}:
        assert 0 < journal.synced_at(path) < journal.named[str(path)] < at
        assert journal.named[str(path)] < journal.synced_at(path.parent) < at
        if path.parent.name not in ("index", "quarantine"):
            assert 0 < journal.synced_at(path.parent.parent) < at or path.parent.name == "x"
