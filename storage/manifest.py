"""Snapshots: what a store held at one moment, as one immutable JSON file, read with suspicion."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
import xxhash

from storage.errors import FormatVersionError, ManifestError

__all__ = [
    "FILE_NAME",
    "FORMAT_VERSION",
    "ColumnSpec",
    "FileRef",
    "Part",
    "Snapshot",
    "TensorFile",
    "TensorSpec",
    "decode_snapshot",
    "encode_snapshot",
]

FORMAT_VERSION = 1
_MAX_BYTES = 1 << 60
_CHECKSUM_MARK = b',\n"checksum": "'
_COLUMN_TYPES = ("string", "int", "float", "bool", "json", "null")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
_XXH3 = re.compile(r"[0-9a-f]{32}")
_PART_ID = re.compile(r"[0-9a-z]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRef:
    """One immutable file.

    path: relative to the store, with forward slashes.
    bytes: its size.
    xxh3: xxh3_128 of the whole file, 32 hexadecimal digits.
    rows: rows in it.
    """

    path: str
    bytes: int
    xxh3: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile(FileRef):
    """An Arrow file of one tensor column.

    offset: where row 0 begins, a multiple of 64.
    blocks_xxh3: xxh3_128 of the block checksums that the footer of the file holds.
    """

    offset: int
    blocks_xxh3: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor column: numpy dtype name and the shape of one row."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        count = 1
        for size in self.shape:
            count *= size
        return np.dtype(self.dtype).itemsize * count


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """A column of the index: its type (string, int, float, bool, json, null) and the part that set it."""

    type: str
    since: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The rows of one commit, or those that a compaction left of several.

    first_row, end_row: all its rows lie in first_row:end_row, where no other part has any.
    row_ids: the number of each row; None when row i of every file is the store's row first_row + i.
    """

    id: str
    first_row: int
    end_row: int
    rows: int
    row_ids: FileRef | None
    index: FileRef
    keys: FileRef
    blobs: FileRef | None
    tensors: Mapping[str, TensorFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One version of a store. Example: Snapshot(id=1, parent=0, num_rows=100, next_row=100, ...).

    created: UTC, ISO 8601.
    num_rows: rows that can be read.
    next_row: the number that the next row will get; numbers are never used twice.
    columns, tensors: the schema, union over the parts.
    parts: in ascending order of first_row.
    deleted: the numbers of the rows that are still in a part but can no longer be read.
    quarantine: Parquet files of what was refused.
    """

    id: int
    parent: int | None
    created: str
    message: str
    num_rows: int
    next_row: int
    columns: Mapping[str, ColumnSpec]
    tensors: Mapping[str, TensorSpec]
    parts: tuple[Part, ...]
    deleted: FileRef | None
    quarantine: tuple[FileRef, ...]


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """The bytes of a snapshot file: a JSON object that ends with the checksum of all bytes before."""
    members = {"format": _dumps(FORMAT_VERSION)}
    for field in dataclass_fields(Snapshot):
        value = getattr(snapshot, field.name)
        if isinstance(value, tuple):
            members[field.name] = "[\n" + ",\n".join(_dumps(item) for item in value) + "\n]"
        else:
            members[field.name] = _dumps(value)
    body = ("{\n" + ",\n".join(f'"{name}": {text}' for name, text in members.items())).encode()
    return body + _CHECKSUM_MARK + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n'


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_members)


def _members(record: object) -> dict[str, Any]:
    """The fields of a part, a file or a specification, for JSON."""
    kind: Any = type(record)
    return {name: getattr(record, name) for name in _field_names(kind)}


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclass_fields(kind))


def decode_snapshot(content: bytes, place: str) -> Snapshot:
    """Read a snapshot file. `place` names it in errors.

    Raises:
        ManifestError: If it is cut short, altered, or lists what no store holds (a path that leaves the
            store, a size beyond 2^60, tensors that overrun their file).
        FormatVersionError: If it is of another format.
    """
    body, mark, tail = content.rpartition(_CHECKSUM_MARK)
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ManifestError(
            f"{place}: the snapshot is cut short or damaged ({error}); open an earlier one"
        ) from None
    if not isinstance(fields, dict) or "format" not in fields:
        raise ManifestError(f"{place}: this is not a snapshot of a feature store")
    if fields["format"] != FORMAT_VERSION:
        raise FormatVersionError(
            f"{place}: the store has format {fields['format']!r}, this version reads format "
            f"{FORMAT_VERSION}; "
            "use the version of UniRL that wrote it, or a newer one"
        )
    if not mark or tail.decode("latin-1").split('"')[0] != xxhash.xxh3_128_hexdigest(body):
        raise ManifestError(
            f"{place}: the checksum of the snapshot is wrong, so it was altered; open an earlier one"
        )
    try:
        return _snapshot(fields)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ManifestError(f"{place}: the snapshot cannot be used: {error!s}") from None


def _snapshot(fields: dict[str, Any]) -> Snapshot:
    columns = {_text(name): _column_spec(value) for name, value in fields["columns"].items()}
    tensors = {_match(FILE_NAME, name): _tensor_spec(value) for name, value in fields["tensors"].items()}
    parts = tuple(_part(value, tensors) for value in fields["parts"])
    snapshot = Snapshot(
        id=_count(fields["id"]),
        parent=None if fields["parent"] is None else _count(fields["parent"]),
        created=_text(fields["created"]),
        message=_text(fields["message"]),
        num_rows=_count(fields["num_rows"]),
        next_row=_count(fields["next_row"]),
        columns=columns,
        tensors=tensors,
        parts=parts,
        deleted=None if fields["deleted"] is None else _file(fields["deleted"], "index"),
        quarantine=tuple(_file(value, "quarantine") for value in fields["quarantine"]),
    )
    end = 0
    for part in parts:
        if part.first_row < end:
            raise ValueError(f"part {part.id} begins at row {part.first_row}, but rows below {end} are taken")
        end = part.end_row
    held = sum(part.rows for part in parts)
    deleted = snapshot.deleted.rows if snapshot.deleted else 0
    if end > snapshot.next_row or held - deleted != snapshot.num_rows:
        raise ValueError(
            f"the parts do not add up to num_rows {snapshot.num_rows}, next_row {snapshot.next_row}"
        )
    return snapshot


def _part(fields: dict[str, Any], specs: Mapping[str, TensorSpec]) -> Part:
    tensors = {}
    for name, value in fields["tensors"].items():
        if name not in specs:
            raise ValueError(f"tensor column {name!r} is not in the schema")
        tensors[name] = _tensor_file(value, name, specs[name])
    part = Part(
        id=_match(_PART_ID, fields["id"]),
        first_row=_count(fields["first_row"]),
        end_row=_count(fields["end_row"]),
        rows=_count(fields["rows"]),
        row_ids=None if fields["row_ids"] is None else _file(fields["row_ids"], "index"),
        index=_file(fields["index"], "index"),
        keys=_file(fields["keys"], "index"),
        blobs=None if fields["blobs"] is None else _file(fields["blobs"], "blobs"),
        tensors=tensors,
    )
    files = (part.index, part.keys, part.row_ids, *tensors.values())
    if part.rows < 1 or any(file is not None and file.rows != part.rows for file in files):
        raise ValueError(f"part {part.id}: its files do not all have {part.rows} rows")
    span = part.end_row - part.first_row
    if span < part.rows or (part.row_ids is None and span != part.rows):
        raise ValueError(f"part {part.id}: {part.rows} rows do not fit {part.first_row}:{part.end_row}")
    return part


def _file(fields: dict[str, Any], folder: str) -> FileRef:
    path = _text(fields["path"])
    steps = path.split("/")
    if steps[0] != folder or len(steps) < 2 or any(not FILE_NAME.fullmatch(step) for step in steps):
        raise ValueError(f"the path {path!r} does not lie in {folder}/ of the store")
    xxh3 = _match(_XXH3, fields["xxh3"])
    return FileRef(path=path, bytes=_count(fields["bytes"]), xxh3=xxh3, rows=_count(fields["rows"]))


def _tensor_file(fields: dict[str, Any], name: str, spec: TensorSpec) -> TensorFile:
    ref = _file(fields, "tensors")
    offset = _count(fields["offset"])
    if offset % 64 or offset + ref.rows * spec.row_bytes > ref.bytes:
        raise ValueError(
            f"tensor column {name!r}: {ref.rows} rows at byte {offset} do not fit {ref.bytes} bytes"
        )
    blocks = _match(_XXH3, fields["blocks_xxh3"])
    return TensorFile(
        path=ref.path, bytes=ref.bytes, xxh3=ref.xxh3, rows=ref.rows, offset=offset, blocks_xxh3=blocks
    )


def _tensor_spec(fields: dict[str, Any]) -> TensorSpec:
    dtype = np.dtype(_text(fields["dtype"]))
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise ValueError(f"dtype {dtype} cannot be stored")
    shape = tuple(_count(size) for size in fields["shape"])
    if any(size == 0 for size in shape):
        raise ValueError(f"shape {shape} has an empty axis")
    return TensorSpec(dtype=dtype.name, shape=shape)


def _column_spec(fields: dict[str, Any]) -> ColumnSpec:
    if fields["type"] not in _COLUMN_TYPES:
        raise ValueError(f"column type {fields['type']!r} is none of {', '.join(_COLUMN_TYPES)}")
    return ColumnSpec(type=fields["type"], since=_text(fields["since"]))


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_BYTES:
        raise ValueError(f"{value!r} is not a whole number from 0 to 2^60")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def _match(pattern: re.Pattern[str], value: object) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{value!r} is not a valid name")
    return value
