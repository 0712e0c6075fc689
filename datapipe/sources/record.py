"""What a source hands over: a sample to judge, a fault that already is certain, or a note for the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from datapipe.sources.column_kinds import ColumnKinds

__all__ = ["MISSING", "Fault", "Item", "Missing", "Note", "Record", "Source", "TextRows"]


class Missing(Enum):
    """The one value that means that a field does not stand in the source at all (null does)."""

    MISSING = "missing"


MISSING: Final = Missing.MISSING


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One sample as the source has it. Nothing in it has been checked yet."""

    key: object  # wanted: a non-empty string; filled by the source, checked by ingest
    place: str  # where in the source: "cats/01.jpg", "s0.tar!0001 @512", "rows.csv:17"
    load: Callable[[], bytes] | None  # reads the encoded picture or video; None when the row has none
    caption: object = MISSING
    read_caption: Callable[[], object] | None = None  # stands in for caption where a file has to be opened
    columns: Mapping[str, object] = field(default_factory=dict)  # free user metadata
    optional: frozenset[str] = frozenset()  # of image, caption: what a sample of this kind may lack
    parts: tuple[Record, ...] = ()  # rows of its other media; all of them are kept, or none

    def caption_value(self) -> object:
        """The caption, read now where that takes opening a file.

        Raises:
            DecodeError: When the file cannot be used.
        """
        return self.caption if self.read_caption is None else self.read_caption()


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A sample, or a piece of a source, that cannot become a row. Counted against the budget."""

    key: str
    place: str
    reason: str  # stable code, such as "duplicate_member"
    detail: str  # found, wanted, remedy
    data: bytes = b""  # the bytes in question, when there are any


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Something a person should know that costs no sample: an ignored file, a repaired path."""

    place: str
    reason: str
    detail: str


Item = Record | Fault | Note


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRows:
    """Consecutive records without media and with the same columns. Nothing in it has been checked yet."""

    keys: Sequence[object]
    places: Sequence[str]
    captions: Sequence[object]
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.keys)

    def records(self) -> Iterator[Record]:
        """The same one by one."""
        names = tuple(self.columns)
        values = zip(*self.columns.values()) if names else ((),) * len(self)
        for key, place, caption, row in zip(self.keys, self.places, self.captions, values):
            yield Record(
                key=key,
                place=place,
                load=None,
                caption=caption,
                columns=dict(zip(names, row)),
                optional=self.optional,
            )

    def blocks(self, num_rows: int) -> Iterator[TextRows]:
        """The same in pieces of at most num_rows."""
        for start in range(0, len(self), num_rows):
            piece = slice(start, start + num_rows)
            yield TextRows(
                keys=self.keys[piece],
                places=self.places[piece],
                captions=self.captions[piece],
                columns={name: values[piece] for name, values in self.columns.items()},
                optional=self.optional,
            )


class Source(Protocol):
    """A place that samples come from. Iterating twice gives the same items in the same order."""

    @property
    def name(self) -> str:
        """Stands in the index column `source`; the same for the same files, wherever it is called from."""

    @property
    def base(self) -> str:
        """Folder that the places of items are relative to."""

    def count(self) -> int | None:
        """Number of samples for the progress bar, or None when only reading everything would tell."""

    def observe_columns(self, kinds: ColumnKinds) -> None:
        """Show the values of all user columns without reading pictures, to choose one type for each."""

    def items(self) -> Iterator[Item | TextRows]:
        """Read the source from its start.

        Raises:
            SourceError: When the source cannot be read at all.
        """
