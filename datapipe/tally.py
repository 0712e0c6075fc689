"""What an ingest does, counted while it runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Final

from datapipe.judge import Row
from datapipe.report import Example, IngestReport
from datapipe.sources.record import Fault, Note

__all__ = ["Tally"]

_MAX_EXAMPLES: Final = 5
_NOTES: Final = {
    "broken_exif": "the pixels are used without it",
    "broken_metadata": "the pixels are used without texts and profile",
    "broken_profile": "the pixels are used without it",
}


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
    codecs: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Example]] = field(default_factory=dict)
    note_examples: dict[str, list[Example]] = field(default_factory=dict)
    duplicate_examples: list[Example] = field(default_factory=list)

    @property
    def num_seen(self) -> int:
        """Samples that were looked at."""
        return self.num_added + self.num_skipped + self.num_left_out + self.reasons.total()

    def add_row(self, row: Row, full_place: str) -> None:
        """Count a new row with what its media were like."""
        self.num_added += 1
        for note in row.notes:
            self._count_note(note.reason, Example(place=full_place, key=row.key, detail=note.detail))
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
            self.codecs[str(columns.get("codec", "not looked at"))] += 1
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
        """Count a bad sample under its reason."""
        self.reasons[fault.reason] += 1
        examples = self.examples.setdefault(fault.reason, [])
        if len(examples) < _MAX_EXAMPLES:
            examples.append(Example(place=full_place, key=fault.key, detail=fault.detail))

    def add_note(self, note: Note, full_place: str) -> None:
        """Count what was ignored or repaired."""
        self._count_note(note.reason, Example(place=full_place, key="", detail=note.detail))

    def _count_note(self, reason: str, example: Example) -> None:
        self.notes[reason] += 1
        examples = self.note_examples.setdefault(reason, [])
        if len(examples) < _MAX_EXAMPLES:
            examples.append(example)

    def to_json(self) -> str:
        """All counts as text, to be carried to another process."""
        return json.dumps({item.name: getattr(self, item.name) for item in fields(self)}, default=asdict)

    @classmethod
    def from_json(cls, text: str) -> Tally:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        for name in ("reasons", "notes", "formats", "modes", "codecs"):
            values[name] = Counter(values[name])
        for name in ("examples", "note_examples"):
            values[name] = {reason: _examples(found) for reason, found in values[name].items()}
        values["duplicate_examples"] = _examples(values["duplicate_examples"])
        return cls(**values)

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
            codecs=dict(self.codecs),
            blob_bytes=self.blob_bytes,
            max_bad_fraction=max_bad_fraction,
            is_dry_run=is_dry_run,
            is_interrupted=self.is_interrupted,
            wall_s=wall_s,
        )


def _examples(found: list[dict[str, str]]) -> list[Example]:
    return [Example(**each) for each in found]
