"""Moving between the snapshots of a store."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from storage.handle import StoreHandle
from storage.history import SnapshotDiff, diff_snapshots, find_tag, list_tags, read_log, remove_tag, write_tag
from storage.manifest import Snapshot
from storage.snapshots import hold_newest, list_snapshot_ids, publish, read_snapshot

__all__ = ["Versions"]


class Versions(StoreHandle):
    """The part of a store handle that knows other snapshots."""

    def log(self) -> list[Snapshot]:
        """This snapshot and those it was made from, newest first."""
        return read_log(self.backend, self.snapshot)

    def diff(self, old: int | str, new: int | str) -> SnapshotDiff:
        """What changed from one snapshot to another, given by number or tag."""
        return diff_snapshots(self._pool, self.at(old).snapshot, self.at(new).snapshot)

    def at(self, snapshot: int | str) -> Self:
        """A handle on another snapshot of the store, given by number or tag.

        Raises:
            SnapshotNotFoundError: If there is none.
        """
        number = find_tag(self.backend, snapshot) if isinstance(snapshot, str) else snapshot
        found = read_snapshot(self.backend, number)
        return type(self)(self.backend, found, self.policy, self.counters, self._pool.narrowed(found.parts))

    def tag(self, name: str, snapshot: int | None = None) -> None:
        """Give a snapshot (by default this one) a name. A tagged snapshot is never removed.

        Raises:
            StorageError: If the name is taken or is not made of letters, digits, "_", "-" and ".".
        """
        write_tag(self.backend, name, self.snapshot.id if snapshot is None else snapshot)

    def untag(self, name: str) -> None:
        """Forget a tag; the snapshot itself stays."""
        remove_tag(self.backend, name)

    def tags(self) -> dict[str, int]:
        """Tags -> number of the snapshot."""
        return list_tags(self.backend)

    def snapshots(self) -> list[Snapshot]:
        """All snapshots, oldest first."""
        return [read_snapshot(self.backend, number) for number in list_snapshot_ids(self.backend)]

    def refresh(self) -> Self:
        """A handle on the newest snapshot, with the same policy and counters."""
        newest, lease = hold_newest(self.backend)
        pool = self._pool.narrowed(newest.parts)
        handle = type(self)(self.backend, newest, self.policy, self.counters, pool)
        del lease
        return handle

    def restore(self, snapshot_id: int, message: str = "") -> Snapshot:
        """Publish a new snapshot with the content of an earlier one. Row numbers are not used again."""
        held = self.at(snapshot_id)
        text = message or f"restore snapshot {snapshot_id}"
        return publish(
            self.backend, lambda newest: replace(held.snapshot, message=text, next_row=newest.next_row)
        )
