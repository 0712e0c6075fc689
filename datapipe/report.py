"""What an ingest did: counted while it runs, frozen when it ends."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Final

from datapipe.errors import DataError
from datapipe.judge import Row
from datapipe.sources.record import Fault, Note

__all__ = ["BadFractionError", "Example", "IngestReport", "Tally"]

_MAX_EXAMPLES: Final = 5
_NOTES: Final = {
    "broken_exif": "the pixels are used without it",
    "broken_profile": "the pixels are used without it",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One sample that stands for a reason."""

    place: str
    key: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestReport:
    """The result of an ingest.

    Every sample of the sources is in exactly one of added, skipped, left out and bad.
    """

    sources: tuple[str, ...]
    store: str
    snapshot: int  # newest snapshot of the store afterwards
    num_finished_sources: int  # read to their end by an earlier run and unchanged since, so not read again
    num_added: int  # new rows
    num_skipped: int  # samples that the store had already
    num_left_out: int  # samples that the store has under another key: same picture, caption and columns
    num_bad: int  # samples and pieces of sources that were quarantined
    reasons: Mapping[str, int]  # reason code -> number of bad samples
    examples: Mapping[str, tuple[Example, ...]]  # reason code -> up to five
    notes: Mapping[str, int]  # what was ignored or repaired without losing a sample
    note_examples: Mapping[str, tuple[Example, ...]]
    num_duplicate_content: int  # samples that differ from another one in the key alone, left out or kept
    num_shared_pictures: int  # added rows whose picture another row has, with another caption or column
    duplicate_examples: tuple[Example, ...]
    num_reoriented: int  # added rows with an EXIF orientation other than 1
    num_with_alpha: int
    num_multi_frame: int
    num_videos: int
    formats: Mapping[str, int]  # of added rows
    modes: Mapping[str, int]  # of added rows, Pillow's names
    blob_bytes: int  # of added rows
    max_bad_fraction: float
    is_dry_run: bool  # nothing was written; the counts are what would have happened
    is_interrupted: bool  # stopped on request; a rerun continues
    wall_s: float

    @property
    def num_seen(self) -> int:
        """Samples that were looked at."""
        return self.num_added + self.num_skipped + self.num_left_out + self.num_bad

    @property
    def bad_fraction(self) -> float:
        """Share of bad samples, 0..1; 0 for an empty source."""
        return self.num_bad / self.num_seen if self.num_seen else 0.0

    @property
    def is_over_budget(self) -> bool:
        return self.bad_fraction > self.max_bad_fraction

    @property
    def rows_per_s(self) -> float:
        """Samples a second, over the whole run."""
        return self.num_seen / self.wall_s if self.wall_s > 0 else 0.0

    def to_dict(self) -> dict[str, object]:
        """All fields and figures derived from them, ready for JSON."""
        derived: dict[str, object] = {
            "num_seen": self.num_seen,
            "bad_fraction": self.bad_fraction,
            "is_over_budget": self.is_over_budget,
            "rows_per_s": self.rows_per_s,
        }
        return asdict(self) | derived

    def to_json(self) -> str:
        """The report as indented JSON text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def write(self, folder: Path) -> Path:
        """Write the report as `ingest-<snapshot>.json` and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"ingest-{self.snapshot:08d}.json"
        path.write_text(self.to_json() + "\n", encoding="utf-8")
        return path


class BadFractionError(DataError):
    """More samples are bad than the budget allows. The good ones have been committed.

    Attributes:
        report: The whole report.
    """

    def __init__(self, report: IngestReport) -> None:
        reasons = "; ".join(
            f"{count} {reason} (first: {report.examples[reason][0].place})"
            for reason, count in sorted(report.reasons.items(), key=lambda item: -item[1])
        )
        remedy = (
            "nothing was written"
            if report.is_dry_run
            else f"the {report.num_added} good ones are committed; see `unirl quarantine {report.store}`, "
            f"or raise max_bad_fraction"
        )
        super().__init__(
            f"{report.num_bad} of {report.num_seen} samples ({report.bad_fraction:.2%}) cannot be used, the "
            f"budget is {report.max_bad_fraction:.2%}: {reasons}; {remedy}"
        )
        self.report = report


@dataclass(kw_only=True, slots=True)
class Tally:
    """The report while it grows."""

    num_added: int = 0
    num_skipped: int = 0
    num_left_out: int = 0
    num_finished_sources: int = 0
    blob_bytes: int = 0
    num_reoriented: int = 0
    num_with_alpha: int = 0
    num_multi_frame: int = 0
    num_videos: int = 0
    num_duplicate_content: int = 0
    num_shared_pictures: int = 0
    is_interrupted: bool = False
    reasons: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Example]] = field(default_factory=dict)
    note_examples: dict[str, list[Example]] = field(default_factory=dict)
    duplicate_examples: list[Example] = field(default_factory=list)

    @property
    def num_seen(self) -> int:
        return self.num_added + self.num_skipped + self.num_left_out + self.reasons.total()

    def add_row(self, row: Row, full_place: str) -> None:
        self.num_added += 1
        if row.media is None:
            return
        columns = row.media.columns
        self.blob_bytes += len(row.media.blob)
        self.formats[str(columns["format"])] += 1
        if row.media.kind == "image":
            self.modes[str(columns["mode"])] += 1
            self.num_reoriented += columns["exif_orientation"] != 1
            self.num_with_alpha += columns["had_alpha"] is True
            self.num_multi_frame += "frame" in columns
        else:
            self.num_videos += 1
        for name in row.media.notes:
            self._count_note(name, Example(place=full_place, key=row.key, detail=_NOTES.get(name, "")))

    def add_texts(self, num_rows: int) -> None:
        """Count rows without media."""
        self.num_added += num_rows

    def add_duplicate(
        self, row: Row, full_place: str, *, is_kept: bool, first_place: Callable[[], str]
    ) -> None:
        """Count a sample whose content another one has. first_place is asked for a few examples only."""
        self.num_duplicate_content += 1
        self.num_left_out += not is_kept
        if len(self.duplicate_examples) < _MAX_EXAMPLES:
            detail = f"the same sample as {first_place()}"
            self.duplicate_examples.append(Example(place=full_place, key=row.key, detail=detail))

    def add_fault(self, fault: Fault, full_place: str) -> None:
        self.reasons[fault.reason] += 1
        examples = self.examples.setdefault(fault.reason, [])
        if len(examples) < _MAX_EXAMPLES:
            examples.append(Example(place=full_place, key=fault.key, detail=fault.detail))

    def add_note(self, note: Note, full_place: str) -> None:
        self._count_note(note.reason, Example(place=full_place, key="", detail=note.detail))

    def _count_note(self, reason: str, example: Example) -> None:
        self.notes[reason] += 1
        examples = self.note_examples.setdefault(reason, [])
        if len(examples) < _MAX_EXAMPLES:
            examples.append(example)

    def merge(self, other: Tally) -> None:
        """Add what another run counted, after what this one has."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            elif isinstance(mine, bool):
                setattr(self, item.name, mine or theirs)
            elif isinstance(mine, int):
                setattr(self, item.name, mine + theirs)
        for mine, theirs in (
            (self.examples, other.examples),
            (self.note_examples, other.note_examples),
            ({"": self.duplicate_examples}, {"": other.duplicate_examples}),
        ):
            for reason, examples in theirs.items():
                kept = mine.setdefault(reason, [])
                kept.extend(examples[: _MAX_EXAMPLES - len(kept)])

    def freeze(
        self,
        *,
        sources: tuple[str, ...],
        store: str,
        snapshot: int,
        max_bad_fraction: float,
        is_dry_run: bool,
        wall_s: float,
    ) -> IngestReport:
        """Make the report."""
        return IngestReport(
            sources=sources,
            store=store,
            snapshot=snapshot,
            num_finished_sources=self.num_finished_sources,
            num_added=self.num_added,
            num_skipped=self.num_skipped,
            num_left_out=self.num_left_out,
            num_bad=self.reasons.total(),
            reasons=dict(self.reasons),
            examples={reason: tuple(found) for reason, found in self.examples.items()},
            notes=dict(self.notes),
            note_examples={reason: tuple(found) for reason, found in self.note_examples.items()},
            num_duplicate_content=self.num_duplicate_content,
            num_shared_pictures=self.num_shared_pictures,
            duplicate_examples=tuple(self.duplicate_examples),
            num_reoriented=self.num_reoriented,
            num_with_alpha=self.num_with_alpha,
            num_multi_frame=self.num_multi_frame,
            num_videos=self.num_videos,
            formats=dict(self.formats),
            modes=dict(self.modes),
            blob_bytes=self.blob_bytes,
            max_bad_fraction=max_bad_fraction,
            is_dry_run=is_dry_run,
            is_interrupted=self.is_interrupted,
            wall_s=wall_s,
        )
