"""Decide whether a record becomes a row: key, caption, metadata, and one full decode of the picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from datapipe.decode.facts import ImageFacts
from datapipe.decode.image import DEFAULT_MAX_PIXELS, check_image
from datapipe.decode.text import check_text
from datapipe.errors import DecodeError
from datapipe.sources.column_kinds import ColumnKinds
from datapipe.sources.paths import printable
from datapipe.sources.record import MISSING, Fault, Record

__all__ = ["INDEX_KINDS", "Judge", "Row", "checked_key"]

_MAX_FAULT_BYTES: Final = 2**20

# Declared in each commit, so that a store of texts alone can be asked for `width > 100` as well.
INDEX_KINDS: Final[dict[str, str]] = {
    "source": "string",
    "place": "string",
    "modality": "string",
    "caption": "string",
    "width": "int",
    "height": "int",
    "format": "string",
    "mode": "string",
    "had_alpha": "bool",
    "exif_orientation": "int",
    "n_frames": "int",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A sample that may enter the store."""

    key: str
    place: str  # relative to the base of its source
    source: str
    blob: bytes | None  # as it came; None for text
    caption: str | None
    facts: ImageFacts | None
    columns: Mapping[str, str | int | float | bool | None]  # the user's

    def index_columns(self) -> dict[str, str | int | float | bool | None]:
        """Everything that stands in the index beside the key and the blob."""
        own: dict[str, str | int | float | bool | None] = {
            "source": self.source,
            "place": self.place,
            "modality": _modality(self),
            "caption": self.caption,
            "width": None if self.facts is None else self.facts.width,
            "height": None if self.facts is None else self.facts.height,
            "format": None if self.facts is None else self.facts.format,
            "mode": None if self.facts is None else self.facts.mode,
            "had_alpha": None if self.facts is None else self.facts.had_alpha,
            "exif_orientation": None if self.facts is None else self.facts.exif_orientation,
            "n_frames": None if self.facts is None else self.facts.n_frames,
        }
        return own | dict(self.columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """The rules of one ingest. Called from many threads; it keeps no state."""

    kinds: ColumnKinds
    optional: frozenset[str] = frozenset()  # of "image", "caption": may be absent, but not broken
    max_pixels: int = DEFAULT_MAX_PIXELS

    def __call__(self, record: Record, source: str) -> Row | Fault:
        """Check a record completely.

        Returns:
            The row, or the fault with its reason code and, for a broken picture, its first MiB.
        """
        key_text = printable(str(record.key)) if record.key is not MISSING else ""
        blob: bytes | None = None
        try:
            key = checked_key(record.key)
            caption = self._caption(record.caption)
            columns = self.kinds.convert(record.columns)
            if record.load is not None:
                blob = record.load()
                facts, _ = check_image(blob, max_pixels=self.max_pixels)
            elif "image" in self.optional:
                facts = None
            else:
                raise DecodeError("image_missing", "the sample has no picture")
        except DecodeError as error:
            data = b"" if blob is None else blob[:_MAX_FAULT_BYTES]
            return Fault(
                key=key_text, place=record.place, reason=error.reason, detail=error.detail, data=data
            )
        return Row(
            key=key,
            place=record.place,
            source=source,
            blob=blob,
            caption=caption,
            facts=facts,
            columns=columns,
        )

    def _caption(self, value: object) -> str | None:
        if "caption" in self.optional and (
            value is MISSING or value is None or (isinstance(value, str) and not value.strip("\0 \t\r\n"))
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
    if row.blob is None:
        return "text"
    return "image" if row.caption is None else "image+text"
