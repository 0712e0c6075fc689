"""Snapshots in use: a reader holds a shared lock on the snapshot's file, which a kill releases."""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from storage.errors import SnapshotNotFoundError
from storage.snapshots import snapshot_path

__all__ = ["Lease", "hold_snapshot", "remove_unless_held"]


class Lease:
    """A snapshot that gc must not remove. Locks are seen on one machine, and not in every network folder."""

    def __init__(self, fd: int) -> None:
        self._finalizer = weakref.finalize(self, os.close, fd)


_leases: weakref.WeakValueDictionary[tuple[str, int], Lease] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def hold_snapshot(root: Path, snapshot_id: int) -> Lease:
    """Hold a snapshot for as long as the result lives; handles of one process share one file descriptor.

    Raises:
        SnapshotNotFoundError: If gc was faster.
    """
    name = (os.path.realpath(root), snapshot_id)
    with _lock:
        lease = _leases.get(name)
        if lease is None:
            lease = _leases[name] = Lease(_open_locked(root, snapshot_id))
        return lease


def _open_locked(root: Path, snapshot_id: int) -> int:
    gone = SnapshotNotFoundError(
        f"{root}: snapshot {snapshot_id} was removed by gc; tag a snapshot to keep it"
    )
    try:
        fd = os.open(snapshot_path(root, snapshot_id), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise gone from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise gone from None
    except OSError:
        return fd
    if os.fstat(fd).st_nlink == 0:
        os.close(fd)
        raise gone
    return fd


def remove_unless_held(root: Path, snapshot_id: int, kept: Callable[[], set[int]]) -> bool:
    """Remove the file of a snapshot that nobody holds and that `kept()` lacks; whether it was removed."""
    path = snapshot_path(root, snapshot_id)
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        if snapshot_id in kept():
            return False
        path.unlink(missing_ok=True)
        return True
