"""One type per user column, chosen over all rows before the first is written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import pyarrow as pa

from datapipe.errors import DecodeError, SourceError
from datapipe.sources.values import clean_value

__all__ = ["ColumnKinds", "Scalar", "kind_of_arrow"]

_MAX_EXACT_INT: Final = 2**53

Scalar = str | int | float | bool | None


@dataclass(slots=True)
class _Seen:
    origins: dict[str, str] = field(default_factory=dict)  # kind -> first place
    is_float_exact: bool = True  # every integer also is an exact float


class ColumnKinds:
    """The union of the types that the values of each column have.

    Only integers: `int`. Numbers: `float`, when that loses no digit. Only true and false: `bool`. Everything
    else, and every mixture: `string`, in which other values stand as JSON text. So a column may start with 1
    and go on with "x", and an empty list may be followed by a list of objects.
    """

    def __init__(self) -> None:
        self._columns: dict[str, _Seen] = {}
        self._folded: dict[str, str] = {}
        self._chosen: dict[str, str | None] = {}  # answers of kind(), until something new is seen

    def observe(self, columns: Mapping[str, object], place: str) -> None:
        """Take the values of one row into account.

        Raises:
            SourceError: When two names differ only in case, which SQL does not tell apart.
        """
        self._chosen.clear()
        for name, value in columns.items():
            seen = self._column(name, place)
            try:
                plain = clean_value(value, field_name=name)
            except DecodeError:
                continue  # the row is quarantined when it is read
            if plain is not None:
                seen.origins.setdefault(_kind(plain), place)
                if isinstance(plain, int) and abs(plain) > _MAX_EXACT_INT:
                    seen.is_float_exact = False

    def declare(self, kinds: Mapping[str, object], place: str) -> None:
        """Take columns into account whose type the file itself tells."""
        self._chosen.clear()
        for name, kind in kinds.items():
            self._column(name, place).origins.setdefault(str(kind), place)

    def names(self) -> frozenset[str]:
        """All columns that were seen."""
        return frozenset(self._columns)

    def all(self) -> dict[str, str]:
        """Kind of each column that has one."""
        return {name: kind for name in self._columns if (kind := self.kind(name)) is not None}

    def kind(self, name: str) -> str | None:
        """`string`, `int`, `float` or `bool`; None for a column without any value."""
        if name not in self._chosen:
            self._chosen[name] = self._choose(name)
        return self._chosen[name]

    def _choose(self, name: str) -> str | None:
        seen = self._columns.get(name)
        if seen is None or not seen.origins:
            return None
        kinds = set(seen.origins)
        if len(kinds) == 1:
            return next(iter(kinds))
        return "float" if kinds == {"int", "float"} and seen.is_float_exact else "string"

    def fit_store(self, sql_types: Mapping[str, str]) -> None:
        """Adopt the types that an existing store has already.

        Raises:
            SourceError: Naming column, both types and the place, when new values do not fit.
        """
        for name, sql_type in sql_types.items():
            have, want = self.kind(name), _KIND_OF_SQL.get(sql_type)
            if have is None or want is None or have == want:
                continue
            if want == "string" or (want == "float" and have == "int" and self._columns[name].is_float_exact):
                self._columns[name].origins = {want: "the store"}
                self._chosen.clear()
                continue
            places = ", ".join(f"{kind} at {place}" for kind, place in self._columns[name].origins.items())
            raise SourceError(
                f"column {name!r} is {want} in the store, but {have} in the source ({places}); map it to "
                f"another name, as in {name}_{have}={name}"
            )

    def convert(self, columns: Mapping[str, object]) -> dict[str, Scalar]:
        """Bring the values of one row to the types of their columns.

        Raises:
            DecodeError: For text that the index cannot hold; see clean_value.
        """
        return {name: self._convert_one(name, value) for name, value in columns.items()}

    def convert_all(self, name: str, values: Sequence[object]) -> Sequence[Scalar]:
        """Bring one column of consecutive rows to its type.

        Raises:
            DecodeError: See convert.
        """
        kind, found = self.kind(name), set(map(type, values)) - {type(None)}
        only = next(iter(found)) if len(found) == 1 else None
        if (
            only is str
            and kind in ("string", None)
            and _is_clean("".join(cast(Iterable[str], filter(None, values))))
        ):
            return cast(Sequence[Scalar], values)
        if only is bool and kind in ("bool", None):
            return cast(Sequence[Scalar], values)
        if only is float and kind in ("float", None):
            return [None if value != value else value for value in values]  # type: ignore[misc] # NaN
        return [self._convert_one(name, value) for value in values]

    def _convert_one(self, name: str, value: object) -> Scalar:
        plain, kind = clean_value(value, field_name=name), self.kind(name)
        if kind == "string" and not isinstance(plain, str | None):
            return json.dumps(plain)
        if kind == "float" and isinstance(plain, int):
            return float(plain)
        return plain

    def _column(self, name: str, place: str) -> _Seen:
        other = self._folded.setdefault(name.casefold(), name)
        if other != name:
            raise SourceError(
                f"{place}: columns {other!r} and {name!r} differ only in upper and lower case, which SQL "
                f"does not tell apart; map one of them to another name"
            )
        return self._columns.setdefault(name, _Seen())


_KIND_OF_SQL: Final = {"VARCHAR": "string", "BIGINT": "int", "DOUBLE": "float", "BOOLEAN": "bool"}


def _is_clean(text: str) -> bool:
    """Whether text needs no look at its parts: no NUL, no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _kind(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return "bool"
    return "int" if isinstance(value, int) else "float" if isinstance(value, float) else "string"


def kind_of_arrow(fields: Iterable[pa.Field]) -> dict[str, object]:
    """Kinds of the columns of a table with a schema. uint64 becomes text: it does not fit 64 signed bits."""
    kinds: dict[str, object] = {}
    for item in fields:
        type_ = item.type.value_type if pa.types.is_dictionary(item.type) else item.type
        if pa.types.is_boolean(type_):
            kinds[item.name] = "bool"
        elif pa.types.is_integer(type_) and type_ != pa.uint64():
            kinds[item.name] = "int"
        elif pa.types.is_floating(type_):
            kinds[item.name] = "float"
        elif not pa.types.is_null(type_):
            kinds[item.name] = "string"
    return kinds
