"""Finding what is wrong with a store, and what can be kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from storage.backends import LocalBackend
from storage.checked_files import read_row_file
from storage.errors import ManifestError
from storage.integrity import Progress
from storage.manifest import Snapshot
from storage.part_check import broken_files, file_problem, list_files
from storage.repair.mending import Mend, examine
from storage.repair.salvage import Salvage
from storage.snapshots import list_snapshot_ids, newest_snapshot, read_snapshot

__all__ = ["Damage", "find_damage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What is wrong with a store.

    base: the newest snapshot that can be read.
    newest: the highest number of a snapshot.
    damaged: numbers of snapshots that cannot be read.
    broken: file -> what is wrong with it.
    mends: one for each part with a broken file.
    deleted: int64, rows that stay deleted.
    """

    base: Snapshot
    newest: int
    damaged: tuple[int, ...]
    broken: dict[str, str]
    mends: tuple[Mend, ...]
    deleted: np.ndarray
    notes: tuple[str, ...]

    @property
    def is_superseded(self) -> bool:
        """Whether newer snapshots than `base` cannot be read."""
        return self.base.id < self.newest


def find_damage(backend: LocalBackend, progress: Progress | None) -> Damage:
    """Check the newest snapshot that can be read, and look into its broken parts; writes nothing.

    Raises:
        StoreNotFoundError: If there is no store.
        ManifestError: If no snapshot can be read.
    """
    ids = list_snapshot_ids(backend)
    if not ids:
        newest_snapshot(backend)  # Says why there is none.
    readable, damaged = [], []
    for number in ids:
        try:
            readable.append(read_snapshot(backend, number))
        except ManifestError:
            damaged.append(number)
    if not readable:
        raise ManifestError(
            f"{backend.url}: none of {len(ids)} snapshots can be read; copy snapshots/ back from a backup"
        )
    base = readable[-1]
    notes = [_stand_in_note(base, ids[-1])] if base.id < ids[-1] else []
    alone = [*base.quarantine, *([base.deleted] if base.deleted else [])]
    broken = {ref.path: text for ref in alone if (text := file_problem(backend, ref))}
    deleted = _deleted_rows(backend, base, readable, broken, notes)
    mends = []
    total = sum(ref.bytes for part in base.parts for ref in list_files(part))
    done = 0
    for part in base.parts:
        found = broken_files(backend, part)
        if found:
            broken |= found
            mends.append(examine(Salvage(backend, part, found), base, deleted))
        done += sum(ref.bytes for ref in list_files(part))
        if progress is not None:
            progress(done, total)
    return Damage(
        base=base,
        newest=ids[-1],
        damaged=tuple(damaged),
        broken=broken,
        mends=tuple(mends),
        deleted=deleted,
        notes=tuple(notes),
    )


def _stand_in_note(base: Snapshot, newest: int) -> str:
    return (
        f"snapshot {newest} cannot be read: snapshot {base.id} stands in for it, and what was written since "
        f"is not in the store (its files stay until gc removes what no snapshot lists)"
    )


def _deleted_rows(
    backend: LocalBackend,
    base: Snapshot,
    readable: Sequence[Snapshot],
    broken: dict[str, str],
    notes: list[str],
) -> np.ndarray:
    """The deleted rows of `base`; if their file is broken, those of the last snapshot that has its own."""
    for snapshot in reversed(readable):
        ref = snapshot.deleted
        if ref is not None and file_problem(backend, ref):
            continue
        rows = np.empty(0, np.int64) if ref is None else read_row_file(backend, ref)
        if ref != base.deleted and base.deleted is not None:
            notes.append(
                f"the list of deleted rows is broken: that of snapshot {snapshot.id} was taken, so that up "
                f"to {max(base.deleted.rows - len(rows), 0)} rows that were deleted later are there again"
            )
        return rows
    return np.empty(0, np.int64)
