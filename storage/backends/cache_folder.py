"""The folder of a shard cache: its locks, and room for one more shard.

What lies in it:

    shards/<name>             a whole shard; its time of change is when it was last asked for
    incoming/<name>           one that is being downloaded
    incoming/<name>.room      as large as that shard will be, so that others count it
    locks/<00 to ff>          locked while a shard of that name's first digits is downloaded
    locks/room                locked while room is made
    open/<process>/<name>     further names of shards that a process opens by path, so that they stay

Every lock is a flock, which a kill releases, and every file in shards/ is complete: it got its name after its
size and checksum were compared. What a killed process left is removed by whoever needs the room.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from storage.backends.folder_locks import hold_abandoned
from storage.errors import StorageError, StorageFullError
from storage.manifest import FileRef

__all__ = ["CACHE", "CACHE_BYTES", "CacheFolder"]

CACHE = "UNIRL_CACHE"
CACHE_BYTES = "UNIRL_CACHE_BYTES"

_POLL_S = 0.02


class _Held(NamedTuple):
    changed: float
    bytes: int
    path: Path


class CacheFolder:
    """Locks and room in one folder. Processes that give the same folder wait for each other.

    path: of the folder.
    max_bytes: what the shards in it may take together.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes

    def make_room(self, room: Path, ref: FileRef) -> None:
        """Let the shards go that were not asked for longest, until there is room; then reserve it.

        Args:
            room: A file that becomes as large as the shard, so that others count it.
            ref: The shard.

        Raises:
            StorageError: If the shard is larger than the cache may be.
            StorageFullError: If the disk has no room even without the shards.
        """
        if ref.bytes > self.max_bytes:
            raise StorageError(
                f"{ref.path}: the shard has {ref.bytes} bytes, the cache {self.path} may hold "
                f"{self.max_bytes}; give it a larger max_bytes, or set {CACHE_BYTES}"
            )
        while True:
            with self.locked("room"):
                if self._has_room(ref):
                    with room.open("wb") as file:
                        file.truncate(ref.bytes)
                    return
            time.sleep(_POLL_S)  # Downloads of others take the rest; they end or are found abandoned.

    def _has_room(self, ref: FileRef) -> bool:
        self._remove_abandoned()
        held = sorted(_files(self.path / "shards"))
        coming = [file for file in _files(self.path / "incoming") if file.path.suffix == ".room"]
        used = sum(file.bytes for file in (*held, *coming))
        while used + ref.bytes > self.max_bytes and held:
            used -= _remove(held.pop(0))
        free = _free_bytes(self.path)
        while free < ref.bytes and held:
            _remove(held.pop(0))
            free = _free_bytes(self.path)
        if free < ref.bytes:
            raise StorageFullError(
                f"{self.path}: the disk of the shard cache is full: {ref.path} needs {ref.bytes} bytes, "
                f"{free} are free; make room, or give the cache another folder ({CACHE})"
            )
        return used + ref.bytes <= self.max_bytes

    def _remove_abandoned(self) -> None:
        """Remove what killed processes left; called while no other process makes room."""
        for file in _files(self.path / "incoming"):
            with self.locked(file.path.name[:2], wait=False) as is_abandoned:
                if is_abandoned:
                    file.path.unlink(missing_ok=True)
        for session in (self.path / "open").iterdir():
            with contextlib.ExitStack() as held:
                if hold_abandoned(session, held):
                    shutil.rmtree(session, ignore_errors=True)

    @contextlib.contextmanager
    def locked(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold a lock of the cache; with wait=False the block is told whether it holds it."""
        for folder in ("shards", "incoming", "locks", "open"):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path / "locks" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            try:
                yield True
            finally:
                # Said aloud, because a child that was forked meanwhile has a copy of the descriptor.
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)


def _files(folder: Path) -> list[_Held]:
    found = []
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            found.append(_Held(status.st_mtime, status.st_size, Path(entry.path)))
    return found


def _remove(file: _Held) -> int:
    file.path.unlink(missing_ok=True)
    return file.bytes


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
