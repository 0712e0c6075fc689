"""What an ingest finds out about the items of its sources, one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

from datapipe.judge import Row
from datapipe.judge_texts import TextColumns
from datapipe.sources import Fault, Note, Source

__all__ = ["Judged", "Met", "Outcome", "Resolved", "Skip", "SourceEnd", "SourceProgress"]


@dataclass(frozen=True, slots=True)
class Met:
    """Keys and contents that other runs of the same ingest take, with their places."""

    keys: dict[str, str] = field(default_factory=dict)
    contents: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Skip:
    """A sample that the store has already."""

    key: str
    place: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """A place whose fault in the quarantine is settled."""

    place: str


@dataclass(frozen=True, slots=True)
class SourceEnd:
    """All outcomes of a source have come."""

    place: str = ""


Judged = Row | TextColumns | Fault | Note | Skip | SourceEnd


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one item of a source."""

    source: Source
    source_index: int
    result: Judged | Resolved

    @property
    def full_place(self) -> str:
        """The base of the source and the place in it; what concerns a whole source has the base alone."""
        return f"{self.source.base}/{self.result.place}" if self.result.place else str(self.source.base)


@dataclass(slots=True)
class SourceProgress:
    """Of one source, as far as its outcomes were settled."""

    num_samples: int = 0
    num_bad: int = 0

    def add(self, other: SourceProgress) -> None:
        """Count in another part of the same source."""
        self.num_samples += other.num_samples
        self.num_bad += other.num_bad
