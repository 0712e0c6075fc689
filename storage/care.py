"""Keeping a store whole and small: check, repair, compact, collect garbage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from storage.handle import StoreHandle
from storage.manifest import Snapshot

if TYPE_CHECKING:
    from storage.deep_check import Decoders
    from storage.garbage import GcReport
    from storage.integrity import Progress, VerifyReport
    from storage.repair import RepairReport

__all__ = ["Care"]


class Care(StoreHandle):
    """The part of a store handle that takes care of the files."""

    def verify(self, *, deep: Decoders | None = None, progress: Progress | None = None) -> VerifyReport:
        """Read everything that this snapshot lists, and compare sizes, checksums and rows.

        The index of each part is compared with its key table row by row: keys, hashes, sizes, row numbers.

        Args:
            deep: Also let the LMDB library find every blob, and decode blobs: one decoder for all, or
                decoders by the value of the column `modality` ({} decodes nothing). A decoder takes the bytes
                and raises ValueError when they are not whole.
            progress: Is called with the bytes done and to do.
        """
        from storage.integrity import verify_store

        return verify_store(self.backend, self.snapshot, deep=deep, progress=progress)

    def repair(self, *, dry_run: bool = False, progress: Progress | None = None) -> RepairReport:
        """Check the newest snapshot, and publish one that does without the broken files.

        They are moved to `broken/<id>/` in the store, beside `lost_keys.jsonl` and `report.json`; nothing is
        deleted. Of a broken blob file the blobs that match their checksum are kept, of a broken tensor file
        the blocks that do; its other rows have no value any more. A broken key table is made anew from the
        index and LMDB. The metadata of a broken index is lost, and its rows with it; their keys and blobs are
        in the quarantine. A newest snapshot that cannot be read is replaced by the last one that can.

        A store that cannot be opened is repaired with `storage.repair_store`.

        Args:
            dry_run: Tell what would be done, and write nothing.
            progress: Is called with the bytes done and to do.

        Raises:
            StorageError: If the store does not lie in a folder.
            CommitConflictError: If another writer changed a broken part meanwhile.
        """
        from storage.repair import repair_store

        return repair_store(self.path, dry_run=dry_run, progress=progress)

    def compact(self, *, max_part_bytes: int = 1 << 30, message: str = "compact") -> Snapshot:
        """Publish a snapshot whose parts have a good size: small ones joined, large ones split.

        Rows keep their numbers, deleted rows are left out. Neighbouring parts are joined while they have the
        same tensor columns and stay below the size; a part that is a quarter larger is split. Nothing is
        published when there is nothing to do. Earlier snapshots keep their parts, until gc.

        Raises:
            CommitConflictError: If another writer changed the same parts meanwhile; appends do not matter.
            StorageFullError: If the new parts do not fit the disk.
        """
        from storage.compaction import compact_parts

        return compact_parts(self._pool, max_part_bytes, message)

    def gc(self, *, grace_s: float = 3600.0, keep_last: int | None = None) -> GcReport:
        """Remove files that no snapshot lists, and with keep_last also old snapshots.

        Args:
            grace_s: Files and snapshots younger than this stay, in seconds.
            keep_last: Keep so many of the newest snapshots, and those that have a tag or that any handle on
                this machine has open; None keeps all.
        """
        from storage.garbage import collect_garbage

        return collect_garbage(self.backend, grace_s=grace_s, keep_last=keep_last)
