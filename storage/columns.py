"""Metadata columns: one type per column for the life of a store, nothing converted with a loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsInt, TypeGuard, cast

import numpy as np
import pyarrow as pa

from storage.errors import ColumnError, ColumnTypeError

__all__ = ["ARROW_TYPES", "RESERVED", "SQL_TYPES", "ColumnTypes", "check_same_types"]

RESERVED = frozenset({"key", "row", "hash", "bytes", "blob", "tensors", "file_index", "file_row_number"})
"""Names that the store sets itself, or that SQL and the arguments of `add` already use."""

SQL_TYPES = {
    "string": "VARCHAR",
    "int": "BIGINT",
    "uint": "UBIGINT",
    "float": "DOUBLE",
    "bool": "BOOLEAN",
    "json": "VARCHAR",
    "null": "VARCHAR",
}
ARROW_TYPES = {
    "string": pa.large_string(),
    "int": pa.int64(),
    "uint": pa.uint64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "json": pa.large_string(),
    "null": pa.large_string(),
}
_MAX_EXACT_INT = 1 << 53
_MAX_TEXT_BYTES = (1 << 31) - (1 << 20)
"""Of one value: Parquet counts the bytes of a value in 31 bits, and its page has a header."""
_MIN_INT, _MAX_INT = -(1 << 63), (1 << 63) - 1
_KINDS: dict[type, str] = {str: "string", int: "int", float: "float", bool: "bool"}

Scalar = str | int | float | bool | None


@dataclass(slots=True)
class _Column:
    type: str
    origin: str


class ColumnTypes:
    """The types that the values of one commit have to have, and where each type was set."""

    def __init__(self, known: Mapping[str, tuple[str, str]], declared: Mapping[str, str]) -> None:
        self._columns = {name: _Column(kind, origin) for name, (kind, origin) in known.items()}
        self._folded = {name.casefold(): name for name in known}
        for name, kind in declared.items():
            if kind not in ARROW_TYPES or kind == "null":
                raise ColumnTypeError(
                    f"column {name!r}: type {kind!r} is none of string, int, uint, float, bool, json"
                )
            self._check_name(name)
            self._settle(name, kind, "the declaration of this commit")

    def types(self) -> dict[str, str]:
        """Column -> type, in the order in which they came up."""
        return {name: column.type for name, column in self._columns.items()}

    def accept(self, name: str, value: object, place: str) -> Scalar:
        """The value as it is stored; `place` names the row in errors.

        Raises:
            ColumnError: If the name cannot be used.
            ColumnTypeError: If the column has another type.
        """
        column = self._columns.get(name)
        if column is None:
            self._check_name(name)
            column = self._columns[name] = _Column("null", place)
            self._folded[name.casefold()] = name
        if value is None:
            return None
        if _KINDS.get(type(value)) == column.type:
            if type(value) is str:
                return _utf8(name, value, place)
            if type(value) is not int or _MIN_INT <= value <= _MAX_INT:
                return cast(Scalar, value)
        if column.type == "json":
            return _json(name, value, place)
        if column.type == "uint" and _is_whole(value) and 0 <= int(value) < 1 << 64:
            return int(value)
        kind, plain = _plain(name, value, place)
        if column.type == "null":
            self._settle(name, kind, place)
        elif (
            column.type == "float"
            and isinstance(plain, int)
            and kind == "int"
            and abs(plain) <= _MAX_EXACT_INT
        ):
            return float(plain)
        elif kind != column.type:
            raise ColumnTypeError(
                f"{place}: column {name!r} is {kind} ({_short(value)}), but {column.type} since "
                f"{column.origin}; convert the value, or declare the column as "
                f"{'uint or json' if _is_whole(value) else 'json'} from its first row on"
            )
        return plain

    def accept_all(
        self, name: str, values: Sequence[object], place: Callable[[int], str]
    ) -> Sequence[Scalar]:
        """The values of consecutive rows as they are stored; `place` names the row at a position in errors.

        Raises:
            ColumnError, ColumnTypeError: See accept.
        """
        found = set(map(type, values)) - {type(None)}
        column = self._columns.get(name)
        if not found and column is not None:
            return cast(Sequence[Scalar], values)  # nulls alone
        kind = _KINDS.get(found.pop()) if len(found) == 1 else None
        if kind is None or column is None or column.type not in (kind, "null") or not _fits(kind, values):
            return [self.accept(name, value, place(at)) for at, value in enumerate(values)]
        self._settle(name, kind, place(0))
        return cast(Sequence[Scalar], values)

    def _settle(self, name: str, kind: str, origin: str) -> None:
        column = self._columns.get(name)
        if column is not None and column.type not in ("null", kind):
            raise ColumnTypeError(
                f"{origin}: column {name!r} is {kind}, but {column.type} since {column.origin}"
            )
        if column is None or column.type == "null":
            self._columns[name] = _Column(kind, origin)
            self._folded[name.casefold()] = name

    def _check_name(self, name: str) -> None:
        if not isinstance(name, str) or not name or "\0" in name or name.casefold() in RESERVED:
            raise ColumnError(
                f"column {name!r} cannot be used: a name is text, not empty, and none of "
                f"{', '.join(sorted(RESERVED))}"
            )
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ColumnError(f"column {name!r} cannot be used: its name is not valid UTF-8 text") from None
        other = self._folded.get(name.casefold(), name)
        if other != name:
            raise ColumnError(
                f"columns {other!r} and {name!r} differ only in case, which SQL does not tell apart"
            )


def _is_whole(value: object) -> TypeGuard[SupportsInt]:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _fits(kind: str, values: Sequence[object]) -> bool:
    """Whether values that are all None or of one plain type can be stored without a look at each."""
    present = [value for value in values if value is not None]
    if kind == "int":
        numbers = cast(list[int], present)
        return min(numbers) >= -(1 << 63) and max(numbers) < 1 << 63
    if kind == "string":
        try:
            return len("".join(cast(list[str], present)).encode()) <= _MAX_TEXT_BYTES
        except UnicodeEncodeError:
            return False
    return True


def check_same_types(mine: Mapping[str, tuple[str, str]], theirs: Mapping[str, tuple[str, str]]) -> None:
    """Refuse a commit whose columns clash with what another writer published meanwhile."""
    merged = ColumnTypes(theirs, {})
    for name, (kind, origin) in mine.items():
        if name not in theirs:
            merged._check_name(name)
        if kind != "null":
            merged._settle(name, kind, origin)


def _plain(name: str, value: object, place: str) -> tuple[str, Scalar]:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return "bool", value
    if isinstance(value, int):
        return ("int", int(value)) if -(1 << 63) <= value < 1 << 63 else ("json", _json(name, value, place))
    if isinstance(value, float):
        return "float", float(value)
    if isinstance(value, str):
        return "string", _utf8(name, str(value), place)
    return "json", _json(name, value, place)


def _json(name: str, value: object, place: str) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    try:
        return _utf8(name, json.dumps(value, ensure_ascii=False), place)
    except RecursionError:
        raise ColumnTypeError(
            f"{place}: column {name!r} holds {type(value).__name__} nested too deep, which has no JSON form; "
            "give a flatter one"
        ) from None
    except (TypeError, ValueError) as error:
        raise ColumnTypeError(
            f"{place}: column {name!r} holds {type(value).__name__} ({_short(value)}), which has no "
            f"JSON form ({error}); "
            "give text, a number, a bool, or lists and dicts of them"
        ) from None


def _utf8(name: str, text: str, place: str) -> str:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise ColumnTypeError(
            f"{place}: column {name!r} is not valid UTF-8 text ({_short(text)}); decode it with "
            "errors='replace' first"
        ) from None
    if num_bytes > _MAX_TEXT_BYTES:
        raise ColumnTypeError(
            f"{place}: column {name!r} has a text of {num_bytes} bytes, Parquet holds {_MAX_TEXT_BYTES} in "
            "one value; keep it as a blob"
        )
    return text


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
