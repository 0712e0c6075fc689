"""Which field of a row is the key, the picture, the caption, and what becomes of the others."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from datapipe.errors import SourceError
from datapipe.sources.paths import printable
from datapipe.sources.record import MISSING

__all__ = ["INDEX_COLUMNS", "FieldMap", "PickedRow"]

# Columns that ingest or the store fills, and words that the store keeps for itself. A user column of one of
# these names, in any case, gets the prefix "user_".
INDEX_COLUMNS: Final = frozenset(
    {
        *("key", "source", "place", "modality", "caption", "width", "height", "format", "mode"),
        *("had_alpha", "exif_orientation", "n_frames", "bytes", "hash", "shard", "part", "row"),
        *("blob", "tensors", "file_index", "file_row_number", "self"),
    }
)

_CANDIDATES: Final[Mapping[str, tuple[str, ...]]] = {
    "key": ("key", "__key__"),
    "image": ("image", "img", "image_bytes", "jpg", "png", "image_path", "file_name", "filename", "path"),
    "caption": ("caption", "text", "txt"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PickedRow:
    """One row after its fields were told apart. A field that is not there is MISSING."""

    key: object
    image: object
    caption: object
    columns: dict[str, object]  # user columns, names free of collisions, values as found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """Their names, worked out once for each set of columns."""

    key: str | None
    image: str | None
    caption: str | None
    columns: tuple[tuple[str, str], ...]  # theirs, ours


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldMap:
    """Names the source's fields. `mapping` is ours to theirs: {"caption": "text"}."""

    mapping: Mapping[str, str] = field(default_factory=dict)
    _plans: dict[tuple[str, ...], _Plan] = field(default_factory=dict, init=False, repr=False, compare=False)

    def check_columns(self, names: Iterable[str], place: str) -> None:
        """Refuse a mapping to a column that a table with fixed columns does not have.

        Raises:
            SourceError: Naming the table's columns and the nearest one.
        """
        found = list(names)
        for ours, theirs in self.mapping.items():
            if theirs not in found:
                near = difflib.get_close_matches(theirs, found, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise SourceError(
                    f"{place}: column {theirs!r} (mapped to {ours!r}) is not there; found {found}{hint}"
                )

    def pick(self, row: Mapping[str, object]) -> PickedRow:
        """Tell key, image and caption from the user's own columns."""
        names = tuple(row)
        plan = self._plans.get(names)
        if plan is None:
            plan = self._plans[names] = self._plan(names)
        return PickedRow(
            key=MISSING if plan.key is None else row.get(plan.key, MISSING),
            image=MISSING if plan.image is None else row.get(plan.image, MISSING),
            caption=MISSING if plan.caption is None else row.get(plan.caption, MISSING),
            columns={ours: row[theirs] for theirs, ours in plan.columns},
        )

    def _plan(self, names: tuple[str, ...]) -> _Plan:
        chosen = {ours: self._their_name(ours, names) for ours in _CANDIDATES}
        renames = {theirs: ours for ours, theirs in self.mapping.items() if ours not in _CANDIDATES}
        taken = set(chosen.values())
        columns = tuple((name, _free_name(renames.get(name, name))) for name in names if name not in taken)
        return _Plan(key=chosen["key"], image=chosen["image"], caption=chosen["caption"], columns=columns)

    def _their_name(self, ours: str, names: tuple[str, ...]) -> str | None:
        if ours in self.mapping:
            return self.mapping[ours]
        return next((name for name in _CANDIDATES[ours] if name in names), None)


def _free_name(name: str) -> str:
    name = printable(name.replace("\0", ""))
    if not name:
        return "user_unnamed"  # the row numbers that pandas writes have no name
    return f"user_{name}" if name.casefold() in INDEX_COLUMNS else name
