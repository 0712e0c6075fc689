"""What an ingest did, as it is returned, written and shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from datapipe.errors import DataError

__all__ = ["BadFractionError", "Example", "IngestReport"]


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
    codecs: Mapping[str, int]  # of added videos, FFmpeg's names
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
