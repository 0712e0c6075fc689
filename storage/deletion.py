"""Deleting rows: they are listed in a file, and stay in their parts until a compaction leaves them out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from storage.disk import write_errors
from storage.manifest import FileRef, Snapshot
from storage.rows import RowMap, write_row_file
from storage.shards import ReaderPool
from storage.snapshots import publish
from storage.staging import Staging

__all__ = ["delete_rows", "install_deleted"]


def delete_rows(pool: ReaderPool, rows: np.ndarray, message: str) -> Snapshot:
    """Publish a snapshot without these rows; rows that are not in the newest snapshot are gone already.

    Args:
        pool: Readers of the store.
        rows: int64 (n,), global row numbers.
    """
    staging = Staging(pool.backend)
    wanted = np.unique(rows)

    def build(newest: Snapshot) -> Snapshot:
        row_map = RowMap(newest, pool)
        live = row_map.live_rows()
        gone = wanted[np.isin(wanted, live, assume_unique=True)]
        if not len(gone):
            return replace(newest, message=message)
        deleted = np.union1d(row_map.deleted, gone)
        ref = install_deleted(staging, newest, deleted)
        return replace(newest, message=message, num_rows=newest.num_rows - len(gone), deleted=ref)

    try:
        return publish(pool.backend, build)
    finally:
        staging.close()


def install_deleted(staging: Staging, newest: Snapshot, deleted: np.ndarray) -> FileRef | None:
    """Write the list of deleted rows for the snapshot after `newest`; None when there are none."""
    if not len(deleted):
        return None
    path = staging.path / "deleted.arrow"
    with write_errors(staging.path):
        write_row_file(path, deleted)
    ref = staging.install(path, f"index/deleted-{staging.id}-{newest.id + 1}.arrow", len(deleted))
    staging.backend.flush([ref.path])
    return ref
