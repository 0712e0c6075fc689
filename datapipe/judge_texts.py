"""Judge samples of text by the column; the result is that of judging each by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final, cast

from datapipe.decode.text import INVISIBLE
from datapipe.errors import DecodeError
from datapipe.judge import Judge, Row
from datapipe.sources.column_kinds import Scalar
from datapipe.sources.record import MISSING, TextRows
from datapipe.sources.values import is_kept_whole

__all__ = ["TextColumns", "judge_texts"]

_NESTED: Final = frozenset({dict, list, tuple})
_OWN: Final = frozenset({"source", "place", "modality", "caption"})


@dataclass(frozen=True, kw_only=True, slots=True)
class TextColumns:
    """Consecutive rows without media that may enter the store."""

    keys: Sequence[str]
    places: Sequence[str]  # relative to the base of their source
    columns: Mapping[str, Sequence[object]]  # everything that stands in the index beside the key

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, source: str) -> Iterator[Row]:
        """The same one by one."""
        user = [name for name in self.columns if name not in _OWN]
        for at, (key, place) in enumerate(zip(self.keys, self.places)):
            columns = {name: cast(Scalar, self.columns[name][at]) for name in user}
            caption = cast(str | None, self.columns["caption"][at])
            yield Row(key=key, place=place, source=source, caption=caption, media=None, columns=columns)

    @property
    def place(self) -> str:
        """Of the first row."""
        return self.places[0]


def judge_texts(rows: TextRows, source: str, judge: Judge) -> TextColumns | None:
    """Check records without media at once.

    Returns:
        None when one of them needs a closer look: then each has to be judged by itself.
    """
    optional = judge.optional | rows.optional
    if "image" not in optional or not _are_texts(rows.keys):
        return None
    nested = [values for values in rows.columns.values() if not _NESTED.isdisjoint(map(type, values))]
    if not all(is_kept_whole(value) for values in nested for value in values):
        return None
    captions = rows.captions
    if all(caption is None or caption is MISSING for caption in captions):
        if "caption" not in optional:
            return None
        captions = [None] * len(rows)
    elif not _are_texts(captions):
        return None
    try:
        user = {name: judge.kinds.convert_all(name, values) for name, values in rows.columns.items()}
    except DecodeError:
        return None
    columns: dict[str, Sequence[object]] = {
        "source": [source] * len(rows),
        "place": rows.places,
        "modality": ["text"] * len(rows),
        "caption": captions,
        **user,
    }
    for name in judge.required:
        values = columns.get(name)
        if values is None or any(value is None for value in values):
            return None
    return TextColumns(keys=[str(key) for key in rows.keys], places=rows.places, columns=columns)


def _are_texts(values: Sequence[object]) -> bool:
    """Whether all are text that check_text accepts."""
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) < len(values) or not all(map(str.strip, texts, repeat(INVISIBLE))):
        return False
    joined = "".join(texts)
    try:
        joined.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in joined
