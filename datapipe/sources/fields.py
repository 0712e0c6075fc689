"""Which field of a row is the key, the picture, the caption, and what becomes of the others."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from datapipe.errors import SourceError
from datapipe.sources.paths import printable
from datapipe.sources.record import MISSING

__all__ = ["INDEX_COLUMNS", "FieldMap", "PickedRow", "UnseenNames", "free_name", "nearest"]

# Columns that ingest or the store fills, and words that the store keeps for itself. A user column of one of
# these names, in any case, gets the prefix "user_".
INDEX_COLUMNS: Final = frozenset(
    {
        *("key", "source", "place", "modality", "caption", "width", "height", "format", "mode"),
        *("had_alpha", "exif_orientation", "n_frames", "bytes", "hash", "shard", "part", "row"),
        *("phash", "source_hash", "frame", "header_frames", "duration_s", "fps", "codec", "rotation"),
        *("had_audio", "is_vfr", "damaged_fraction"),
        *("blob", "tensors", "file_index", "file_row_number", "self"),
    }
)

_ALWAYS: Final[Mapping[str, tuple[str, ...]]] = {
    "key": ("key", "__key__"),
    "image": ("image", "img", "image_bytes", "jpg", "png", "image_path", "file_name", "filename", "path"),
    "video": ("video", "video_bytes", "mp4", "webm", "video_path"),
    "caption": ("caption", "text", "txt", "prompt"),
}
_SEVERAL: Final[Mapping[str, tuple[str, ...]]] = {"images": ("images",), "videos": ("videos",)}
_CONVERSATION: Final[Mapping[str, tuple[str, ...]]] = {
    "messages": ("messages", "conversations"),
    "system": ("system",),
}
_PREFERENCE: Final[Mapping[str, tuple[str, ...]]] = {
    "chosen": ("chosen", "chosen_image"),
    "rejected": ("rejected", "rejected_image"),
    "prompt": ("prompt", "question"),
}
_FIELDS: Final = frozenset({*_ALWAYS, *_SEVERAL, *_CONVERSATION, *_PREFERENCE})


@dataclass(frozen=True, kw_only=True, slots=True)
class PickedRow:
    """One row after its fields were told apart. A field that is not there is MISSING."""

    key: object
    image: object
    caption: object
    columns: dict[str, object]  # user columns, names free of collisions, values as found
    others: dict[str, object] = field(default_factory=dict)  # video, images, messages, chosen, ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """Their names, worked out once for each set of columns."""

    key: str | None
    image: str | None
    caption: str | None
    columns: tuple[tuple[str, str], ...]  # theirs, ours
    others: tuple[tuple[str, str], ...]  # theirs, ours
    is_flat: bool  # every name is that of a column


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldMap:
    """Names the source's fields. `mapping` is ours to theirs: {"caption": "text"}.

    Theirs may be nested, as in "meta.caption" or "captions.0", where no column has the name as a whole.
    """

    mapping: Mapping[str, str] = field(default_factory=dict)
    is_text_only: bool = False  # rows are prompts: no column is taken for a picture or a video
    _plans: dict[tuple[str, ...], _Plan] = field(default_factory=dict, init=False, repr=False, compare=False)

    def check_columns(self, names: Iterable[str], place: str) -> None:
        """Refuse a mapping to a column that a table with fixed columns does not have.

        Raises:
            SourceError: Naming the table's columns and the nearest one, or two that would become one.
        """
        found = list(names)
        for ours, theirs in self.mapping.items():
            if theirs not in found and theirs.partition(".")[0] not in found:
                raise SourceError(
                    f"{place}: column {theirs!r} (mapped to {ours!r}) is not there; found {found}"
                    f"{nearest(theirs, found)}"
                )
        try:
            self._plan_of(tuple(found))
        except SourceError as error:
            raise SourceError(f"{place}: {error}") from None

    def unseen(self) -> UnseenNames:
        """A check of the mapped names for tables in which each row has its own columns."""
        return UnseenNames(self.mapping)

    def pick(self, row: Mapping[str, object]) -> PickedRow:
        """Tell key, picture, caption and the other known fields from the user's own columns."""
        plan = self._plan_of(tuple(row))
        if plan.is_flat:
            return PickedRow(
                key=MISSING if plan.key is None else row[plan.key],
                image=MISSING if plan.image is None else row[plan.image],
                caption=MISSING if plan.caption is None else row[plan.caption],
                columns={ours: row[theirs] for theirs, ours in plan.columns},
                others={ours: row[theirs] for theirs, ours in plan.others},
            )
        return PickedRow(
            key=MISSING if plan.key is None else _value(row, plan.key),
            image=MISSING if plan.image is None else _value(row, plan.image),
            caption=MISSING if plan.caption is None else _value(row, plan.caption),
            columns={
                ours: value for theirs, ours in plan.columns if (value := _value(row, theirs)) is not MISSING
            },
            others={ours: _value(row, theirs) for theirs, ours in plan.others} if plan.others else {},
        )

    def user_columns(self, names: Iterable[str]) -> dict[str, str]:
        """The user's own columns of a table: ours to theirs."""
        return {ours: theirs for theirs, ours in self._plan_of(tuple(names)).columns}

    def text_columns(self, names: Iterable[str]) -> tuple[str | None, str | None] | None:
        """Their names of key and caption, when rows of these columns are texts without anything beside."""
        plan = self._plan_of(tuple(names))
        is_plain = plan.image is None and not plan.others
        return (plan.key, plan.caption) if is_plain and plan.is_flat else None

    def _plan_of(self, names: tuple[str, ...]) -> _Plan:
        plan = self._plans.get(names)
        if plan is None:
            plan = self._plans[names] = self._plan(names)
        return plan

    def _plan(self, names: tuple[str, ...]) -> _Plan:
        chosen = self._choose(names)
        taken = set(chosen.values())
        renames = {theirs: ours for ours, theirs in self.mapping.items() if ours not in _FIELDS}
        columns = [(name, free_name(renames.get(name, name))) for name in names if name not in taken]
        nested = [(theirs, free_name(ours)) for theirs, ours in renames.items() if theirs not in names]
        columns += [pair for pair in nested if pair[0].partition(".")[0] in names]
        _refuse_meeting(columns)
        singles = ("key", "image", "caption")
        used = [*chosen.values(), *(theirs for theirs, _ in columns)]
        return _Plan(
            key=chosen.get("key"),
            image=chosen.get("image"),
            caption=chosen.get("caption"),
            columns=tuple(columns),
            is_flat=all(name in names for name in used),
            others=tuple((theirs, ours) for ours, theirs in chosen.items() if ours not in singles),
        )

    def _choose(self, names: tuple[str, ...]) -> dict[str, str]:
        """Our fields to their names, for one set of columns."""
        if self.is_text_only:
            found = self._find({name: _ALWAYS[name] for name in ("key", "caption")}, names)
        else:
            found = self._find(_ALWAYS, names)
        conversation = self._find(_CONVERSATION, names)
        preference = self._find(_PREFERENCE, names)
        if "messages" in conversation:
            found |= conversation
        elif {"chosen", "rejected"} <= preference.keys():
            if found.get("caption") == preference.get("prompt"):
                found.pop("caption", None)
            found |= preference
        several = {} if self.is_text_only else self._find(_SEVERAL, names)
        if "messages" in found or not {"image", "video"} & found.keys():
            found |= several
        return found

    def _find(self, candidates: Mapping[str, tuple[str, ...]], names: tuple[str, ...]) -> dict[str, str]:
        renamed = {theirs for ours, theirs in self.mapping.items() if ours not in _FIELDS}
        found: dict[str, str] = {}
        for ours, usual in candidates.items():
            mapped = self.mapping.get(ours)
            theirs = mapped or next((name for name in usual if name in names and name not in renamed), None)
            if theirs is not None:
                found[ours] = theirs
        return found


class UnseenNames:
    """Mapped names that no row has shown so far."""

    def __init__(self, mapping: Mapping[str, str]) -> None:
        self._mapping = dict(mapping)
        self._found: set[str] = set()
        self._num_rows = 0

    def look(self, row: Mapping[str, object]) -> None:
        """Take one row into account."""
        self._num_rows += 1
        if not self._mapping:
            return
        self._found.update(row)
        self._mapping = {ours: name for ours, name in self._mapping.items() if _value(row, name) is MISSING}

    def refuse(self, place: str, *, is_empty_fine: bool = True) -> None:
        """Say which mapped name is in no row.

        Args:
            place: What the rows are of.
            is_empty_fine: Whether nothing is said where there was no row at all.

        Raises:
            SourceError: Naming the names that were found and the nearest one.
        """
        for ours, theirs in self._mapping.items() if self._num_rows or not is_empty_fine else ():
            raise SourceError(
                f"{place}: no row has {theirs!r} (mapped to {ours!r}); found {sorted(self._found)}"
                f"{nearest(theirs, self._found)}"
            )


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as "; did you mean 'caption'?", or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _value(row: Mapping[str, object], name: str) -> object:
    if name in row:
        return row[name]
    value: object = row
    for part in name.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return MISSING
    return value


def free_name(name: str) -> str:
    """The name that a column of the source gets in the index."""
    name = printable(name.replace("\0", ""))
    if not name:
        return "user_unnamed"  # the row numbers that pandas writes have no name
    return f"user_{name}" if name.casefold() in INDEX_COLUMNS else name


def _refuse_meeting(columns: Iterable[tuple[str, str]]) -> None:
    """Refuse two columns that get one name, as "row" and "user_row": one would take the other's place."""
    owners: dict[str, str] = {}
    for theirs, ours in columns:
        other = owners.setdefault(ours, theirs)
        if other != theirs:
            raise SourceError(
                f"columns {other!r} and {theirs!r} would both be stored as {ours!r}; map one of them to "
                "another name, or rename it"
            )
