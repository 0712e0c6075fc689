"""What a repair found and did."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["LostRow", "RepairReport", "lost_lines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRow:
    """A row that can no longer be read. key, row: None where even that cannot be told."""

    key: str | None
    row: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What a repair found and did, or would do.

    snapshot: what was published; None when nothing was wrong, or in a dry run.
    damaged_snapshots: numbers of snapshots that cannot be read.
    restored: the snapshot that stands in for a newest one that cannot be read, else None.
    broken: file, relative to the store -> what is wrong with it.
    lost: rows that are left out.
    missing: tensor column -> rows that have no value any more.
    moved: files that were taken out of the store, relative to it.
    folder: where they lie now, relative to the store, beside `lost_keys.jsonl` and `report.json`.
    notes: what else there is to know.
    """

    snapshot: int | None
    damaged_snapshots: Sequence[int]
    restored: int | None
    broken: Mapping[str, str]
    lost: Sequence[LostRow]
    missing: Mapping[str, int]
    moved: Sequence[str]
    folder: str | None
    notes: Sequence[str]

    @property
    def is_whole(self) -> bool:
        """Whether there was nothing to repair."""
        return not self.broken and not self.damaged_snapshots

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return {"is_whole": self.is_whole, **asdict(self)}


def lost_lines(lost: Sequence[LostRow]) -> str:
    """The lost rows as JSON lines."""
    return "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in lost)
