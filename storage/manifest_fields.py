"""The members of a snapshot file, each checked before it is believed. What is wrong is a ValueError."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from storage.columns import RESERVED
from storage.manifest import FILE_NAME, ColumnSpec, FileRef, ModelRecord, TensorFile, TensorSpec

__all__ = [
    "MAX_AXES",
    "MAX_BYTES",
    "read_columns",
    "read_count",
    "read_file",
    "read_match",
    "read_optional_file",
    "read_tensor_file",
    "read_tensor_spec",
    "read_text",
    "refuse_repeated",
    "short_repr",
]

MAX_BYTES = 1 << 60
MAX_AXES = 32
_COLUMN_TYPES = ("string", "int", "uint", "float", "bool", "json", "null")
_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64",
)  # fmt: skip
_XXH3 = re.compile(r"[0-9a-f]{32}")
_PATH = re.compile(rf"{FILE_NAME.pattern}(?:/{FILE_NAME.pattern}){{1,2}}")


def refuse_repeated(what: str, names: Iterable[str]) -> None:
    """Refuse a name that comes twice; `what` says of what."""
    seen = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} {short_repr(name)} is listed twice")
        seen.add(name)


def read_file(fields: dict[str, Any], folder: str) -> FileRef:
    """A file in a folder of the store."""
    path = read_text(fields["path"])
    if not _PATH.fullmatch(path) or not path.startswith(f"{folder}/"):
        raise ValueError(f"the path {short_repr(path)} does not lie in {folder}/ of the store")
    xxh3 = read_match(_XXH3, fields["xxh3"])
    return FileRef(path=path, bytes=read_count(fields["bytes"]), xxh3=xxh3, rows=read_count(fields["rows"]))


def read_optional_file(fields: dict[str, Any] | None, folder: str) -> FileRef | None:
    """A file, or None for null."""
    return None if fields is None else read_file(fields, folder)


def read_tensor_file(fields: dict[str, Any], name: str, specs: Mapping[str, TensorSpec]) -> TensorFile:
    """A file of a tensor column that has to be in the schema."""
    if name not in specs:
        raise ValueError(f"tensor column {short_repr(name)} is not in the schema")
    ref = read_file(fields, "tensors")
    offset = read_count(fields["offset"])
    if offset % 64 or offset + ref.rows * specs[name].row_bytes > ref.bytes:
        raise ValueError(
            f"tensor column {name!r}: {ref.rows} rows at byte {offset} do not fit {ref.bytes} bytes"
        )
    return TensorFile(
        path=ref.path,
        bytes=ref.bytes,
        xxh3=ref.xxh3,
        rows=ref.rows,
        offset=offset,
        blocks_xxh3=read_match(_XXH3, fields["blocks_xxh3"]),
        present=read_optional_file(fields.get("present"), "tensors"),
    )


def read_tensor_spec(fields: dict[str, Any]) -> TensorSpec:
    """A tensor column."""
    if fields["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {short_repr(fields['dtype'])} is none of {', '.join(_DTYPES)}")
    shape = tuple(read_count(size) for size in fields["shape"])
    model = fields.get("model")
    spec = TensorSpec(dtype=fields["dtype"], shape=shape, model=None if model is None else _model(model))
    if 0 in shape or len(shape) > MAX_AXES or spec.row_bytes >= MAX_BYTES:
        raise ValueError(f"shape {short_repr(shape)} has an empty axis, too many axes, or too many values")
    return spec


def _model(fields: dict[str, Any]) -> ModelRecord:
    digest = fields["hash"]
    return ModelRecord(name=read_text(fields["name"]), hash=None if digest is None else read_text(digest))


def read_columns(fields: dict[str, Any]) -> dict[str, ColumnSpec]:
    """The metadata columns."""
    columns = {read_text(name): _column_spec(value) for name, value in fields.items()}
    folded = [name.casefold() for name in columns]
    wrong = [name for name in columns if not name or "\0" in name or name.casefold() in RESERVED]
    if wrong:
        raise ValueError(f"a column cannot have the name {short_repr(wrong[0])}")
    refuse_repeated("column, but for case,", folded)
    return columns


def _column_spec(fields: dict[str, Any]) -> ColumnSpec:
    if fields["type"] not in _COLUMN_TYPES:
        raise ValueError(f"column type {short_repr(fields['type'])} is none of {', '.join(_COLUMN_TYPES)}")
    return ColumnSpec(type=fields["type"], since=read_text(fields["since"]))


def read_count(value: object) -> int:
    """A whole number that a size or a row number may be."""
    if type(value) is int and 0 <= value < MAX_BYTES:
        return value
    raise ValueError(f"{short_repr(value)} is not a whole number from 0 to 2^60")


def read_text(value: object) -> str:
    """Text that is UTF-8."""
    if not isinstance(value, str):
        raise ValueError(f"{short_repr(value)} is not text")
    value.encode()
    return value


def read_match(pattern: re.Pattern[str], value: object) -> str:
    """Text of a form."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{short_repr(value)} is not a valid name")
    return value


def short_repr(value: object) -> str:
    """A value for an error, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
