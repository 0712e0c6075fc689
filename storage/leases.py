"""Snapshots in use: gc must not remove them."""

from __future__ import annotations

import sys
import weakref

from storage.backends.base import Backend, Lease
from storage.errors import SnapshotNotFoundError
from storage.fork_locks import new_lock

__all__ = ["hold_snapshot", "snapshot_name"]

_leases: weakref.WeakValueDictionary[tuple[str, int], Lease] = weakref.WeakValueDictionary()
_lock = new_lock(sys.modules[__name__], "_lock")


def snapshot_name(snapshot_id: int) -> str:
    """The file of a snapshot."""
    return f"snapshots/{snapshot_id:08d}.json"


def hold_snapshot(backend: Backend, snapshot_id: int) -> Lease:
    """Hold a snapshot for as long as the result lives; handles of one process share one lease.

    Raises:
        SnapshotNotFoundError: If gc was faster.
    """
    place = (backend.identity, snapshot_id)
    with _lock:
        lease = _leases.get(place)
        if lease is None:
            try:
                lease = _leases[place] = backend.hold(snapshot_name(snapshot_id))
            except FileNotFoundError:
                raise SnapshotNotFoundError(
                    f"{backend.url}: snapshot {snapshot_id} was removed by gc; tag a snapshot to keep it"
                ) from None
        return lease
