"""Decide whether a record becomes a row: key, caption, metadata, and one full decode of its media."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import xxhash

from datapipe.decode.text import INVISIBLE, check_text
from datapipe.errors import DecodeError
from datapipe.media import MEDIA_KINDS, Media, judge_media
from datapipe.media_rules import MediaRules
from datapipe.sources.column_kinds import ColumnKinds
from datapipe.sources.paths import printable
from datapipe.sources.record import MISSING, Fault, Note, Record
from datapipe.sources.values import is_kept_whole

__all__ = ["INDEX_KINDS", "Judge", "Row", "checked_key"]

_MAX_FAULT_BYTES: Final = 2**20

# Declared in each commit, so that a store of texts alone can be asked for `width > 100` as well.
INDEX_KINDS: Final[dict[str, str]] = {
    "source": "string",
    "place": "string",
    "modality": "string",
    "caption": "string",
} | MEDIA_KINDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A sample that may enter the store."""

    key: str
    place: str  # relative to the base of its source
    source: str
    caption: str | None
    media: Media | None  # None for text
    columns: Mapping[str, str | int | float | bool | None]  # the user's
    content_hash: str | None = None  # xxh3_128 of the file as it came; None for text
    notes: tuple[Note, ...] = ()  # what was changed to keep it

    @property
    def blob(self) -> bytes | None:
        """What is stored under the key; None for text."""
        return None if self.media is None else self.media.blob

    def index_columns(self) -> dict[str, str | int | float | bool | None]:
        """Everything that stands in the index beside the key and the blob; what is left out is null."""
        own: dict[str, str | int | float | bool | None] = {
            "source": self.source,
            "place": self.place,
            "modality": _modality(self),
            "caption": self.caption,
        }
        if self.media is not None:
            own.update(self.media.columns)
        own.update(self.columns)
        return own


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """The rules of one ingest. Called from many threads; it keeps no state."""

    kinds: ColumnKinds
    optional: frozenset[str] = frozenset()  # of "image", "caption": may be absent, but not broken
    media: MediaRules = MediaRules()  # noqa: RUF009 - frozen
    required: frozenset[str] = frozenset()  # columns of the index that must not be null

    def __call__(self, record: Record, source: str) -> list[Row] | Fault:
        """Check a record completely.

        Returns:
            The row, or one for each frame where those are wanted, after those of the record's parts; else
            the fault with its reason code and, for broken media, their first MiB.
        """
        rows: list[Row] = []
        # The main row comes last: a rerun that finds it knows that its parts are there.
        for part in (*record.parts, record):
            judged = self._judge_one(part, source)
            if isinstance(judged, Fault):
                if part is not record:
                    detail = f"{judged.key!r}: {judged.detail}"
                    return replace(judged, key=printable(str(record.key)), detail=detail)
                return judged
            rows.extend(judged)
        return rows

    def _judge_one(self, record: Record, source: str) -> list[Row] | Fault:
        optional = self.optional | record.optional
        key_text = printable(str(record.key)) if record.key is not MISSING else ""
        blob: bytes | None = None
        try:
            key = checked_key(record.key)
            caption = _checked_caption(record.caption_value(), is_optional="caption" in optional)
            columns = self.kinds.convert(record.columns)
            found: list[Media | None] = []
            if record.load is not None:
                blob = record.load()
                found.extend(judge_media(blob, self.media))
            elif "image" in optional:
                found.append(None)
            else:
                raise DecodeError("image_missing", "the sample has no picture or video")
        except DecodeError as error:
            data = b"" if blob is None else blob[:_MAX_FAULT_BYTES]
            return Fault(
                key=key_text, place=record.place, reason=error.reason, detail=error.detail, data=data
            )
        digest = None if blob is None else xxhash.xxh3_128_hexdigest(blob)
        notes = tuple(_lost_numbers(record))
        keys = [key] if len(found) == 1 else [f"{key}/frame-{number:05d}" for number in range(len(found))]
        rows = [
            Row(
                key=name,
                place=record.place,
                source=source,
                caption=caption,
                media=media,
                columns=columns,
                content_hash=digest,
                notes=notes if number == 0 else (),
            )
            for number, (name, media) in enumerate(zip(keys, found))
        ]
        for name in sorted(self.required):
            if any(row.index_columns().get(name) is None for row in rows):
                detail = f"the sample has no {name}, which is required"
                return Fault(key=key_text, place=record.place, reason=f"{name}_missing", detail=detail)
        return rows


def _lost_numbers(record: Record) -> Iterator[Note]:
    for name, value in record.columns.items():
        if not is_kept_whole(value):
            detail = f"{name}: NaN or an infinity in a list or an object is null now, JSON has no such number"
            yield Note(place=record.place, reason="number_became_null", detail=detail)


def _checked_caption(value: object, *, is_optional: bool) -> str | None:
    if is_optional and (
        value is MISSING or value is None or (isinstance(value, str) and not value.strip("\0" + INVISIBLE))
    ):
        return None
    if value is MISSING:
        raise DecodeError("caption_missing", "the sample has no caption")
    return check_text(value, field="caption")


def checked_key(value: object) -> str:
    """Return the key as text; whole numbers are written out.

    Raises:
        DecodeError: Reasons `key_none`, `key_empty`, `key_bool`, ..., `nul_byte`, `not_utf8`.
    """
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(value)
    return check_text(None if value is MISSING else value, field="key")


def _modality(row: Row) -> str:
    if row.media is None:
        return "text"
    return row.media.kind if row.caption is None else f"{row.media.kind}+text"
