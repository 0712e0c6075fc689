"""Snapshots as JSON: written with a checksum, read with suspicion."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields as dataclass_fields
from typing import Any

import xxhash

from storage.columns import RESERVED
from storage.errors import FormatVersionError, ManifestError
from storage.manifest import (
    FILE_NAME,
    ColumnSpec,
    FileRef,
    ModelRecord,
    Part,
    Snapshot,
    TensorFile,
    TensorSpec,
)

__all__ = ["FORMAT_VERSION", "decode_snapshot", "encode_snapshot"]

FORMAT_VERSION = 2
_READABLE_VERSIONS = (1, 2)
_MAX_BYTES = 1 << 60
_MAX_AXES = 32
_MIN_KEY_BYTES = 32
"""Each row takes more than this in its key table, so a count of rows cannot be larger than its files."""
_CHECKSUM_MARK = b',\n"checksum": "'
_COLUMN_TYPES = ("string", "int", "uint", "float", "bool", "json", "null")
_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64",
)  # fmt: skip
_XXH3 = re.compile(r"[0-9a-f]{32}")
_PART_ID = re.compile(r"[0-9a-z]{1,64}")
_PATH = re.compile(rf"{FILE_NAME.pattern}(?:/{FILE_NAME.pattern}){{1,2}}")


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
            store, a size beyond 2^60, more rows than bytes, a file twice).
        FormatVersionError: If it is of another format.
    """
    body, mark, tail = content.rpartition(_CHECKSUM_MARK)
    try:
        fields = json.loads(content, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ManifestError(
            f"{place}: the snapshot is cut short or damaged ({_short(str(error))}); open an earlier one"
        ) from None
    if not isinstance(fields, dict) or "format" not in fields:
        raise ManifestError(f"{place}: this is not a snapshot of a feature store")
    if type(fields["format"]) is not int or fields["format"] not in _READABLE_VERSIONS:
        raise FormatVersionError(
            f"{place}: the store has format {_short(fields['format'])}, this version reads formats "
            f"{' and '.join(map(str, _READABLE_VERSIONS))}; "
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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; readers do not agree on which of two members of one name counts."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("an object has two members of one name")
    return members


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _snapshot(fields: dict[str, Any]) -> Snapshot:
    tensors = {_match(FILE_NAME, name): _tensor_spec(value) for name, value in fields["tensors"].items()}
    parts = tuple(_part(value, tensors) for value in fields["parts"])
    snapshot = Snapshot(
        id=_count(fields["id"]),
        parent=None if fields["parent"] is None else _count(fields["parent"]),
        created=_text(fields["created"]),
        message=_text(fields["message"]),
        num_rows=_count(fields["num_rows"]),
        next_row=_count(fields["next_row"]),
        columns=_columns(fields["columns"]),
        tensors=tensors,
        parts=parts,
        deleted=_optional_file(fields["deleted"], "index"),
        quarantine=tuple(_file(value, "quarantine") for value in fields["quarantine"]),
    )
    _check_parts(snapshot)
    return snapshot


def _check_parts(snapshot: Snapshot) -> None:
    end = 0
    for part in snapshot.parts:
        if part.first_row < end:
            raise ValueError(f"part {part.id} begins at row {part.first_row}, but rows below {end} are taken")
        end = part.end_row
    held = sum(part.rows for part in snapshot.parts)
    deleted = snapshot.deleted.rows if snapshot.deleted else 0
    if end > snapshot.next_row or held - deleted != snapshot.num_rows:
        raise ValueError(
            f"the parts do not add up to num_rows {snapshot.num_rows}, next_row {snapshot.next_row}"
        )
    _refuse_repeated("part", (part.id for part in snapshot.parts))
    files = [*snapshot.quarantine, snapshot.deleted]
    for part in snapshot.parts:
        files += [part.index, part.keys, part.row_ids, part.blobs, *part.tensors.values()]
        files += [tensor.present for tensor in part.tensors.values()]
    _refuse_repeated("file", (file.path for file in files if file is not None))


def _refuse_repeated(what: str, names: Iterable[str]) -> None:
    seen = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} {_short(name)} is listed twice")
        seen.add(name)


def _part(fields: dict[str, Any], specs: Mapping[str, TensorSpec]) -> Part:
    part = Part(
        id=_match(_PART_ID, fields["id"]),
        first_row=_count(fields["first_row"]),
        end_row=_count(fields["end_row"]),
        rows=_count(fields["rows"]),
        row_ids=_optional_file(fields["row_ids"], "index"),
        index=_file(fields["index"], "index"),
        keys=_file(fields["keys"], "index"),
        blobs=_optional_file(fields["blobs"], "blobs"),
        tensors={name: _tensor_file(value, name, specs) for name, value in fields["tensors"].items()},
    )
    files = [part.index, part.keys, part.row_ids, *(t for t in part.tensors.values() if t.present is None)]
    if part.rows < 1 or any(file is not None and file.rows != part.rows for file in files):
        raise ValueError(f"part {part.id}: its files do not all have {part.rows} rows")
    if part.keys.bytes < _MIN_KEY_BYTES * part.rows:
        raise ValueError(f"part {part.id}: {part.rows} rows do not fit the {part.keys.bytes} bytes of keys")
    for name, tensor in part.tensors.items():
        if tensor.present is not None and not 0 < tensor.rows == tensor.present.rows < part.rows:
            raise ValueError(
                f"part {part.id}: tensor column {name!r} has {tensor.rows} rows, listed are "
                f"{tensor.present.rows} of {part.rows}"
            )
    span = part.end_row - part.first_row
    if span < part.rows or (part.row_ids is None and span != part.rows):
        raise ValueError(f"part {part.id}: {part.rows} rows do not fit {part.first_row}:{part.end_row}")
    return part


def _file(fields: dict[str, Any], folder: str) -> FileRef:
    path = _text(fields["path"])
    if not _PATH.fullmatch(path) or not path.startswith(f"{folder}/"):
        raise ValueError(f"the path {_short(path)} does not lie in {folder}/ of the store")
    xxh3 = _match(_XXH3, fields["xxh3"])
    return FileRef(path=path, bytes=_count(fields["bytes"]), xxh3=xxh3, rows=_count(fields["rows"]))


def _optional_file(fields: dict[str, Any] | None, folder: str) -> FileRef | None:
    return None if fields is None else _file(fields, folder)


def _tensor_file(fields: dict[str, Any], name: str, specs: Mapping[str, TensorSpec]) -> TensorFile:
    if name not in specs:
        raise ValueError(f"tensor column {_short(name)} is not in the schema")
    ref = _file(fields, "tensors")
    offset = _count(fields["offset"])
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
        blocks_xxh3=_match(_XXH3, fields["blocks_xxh3"]),
        present=_optional_file(fields.get("present"), "tensors"),
    )


def _tensor_spec(fields: dict[str, Any]) -> TensorSpec:
    if fields["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {_short(fields['dtype'])} is none of {', '.join(_DTYPES)}")
    shape = tuple(_count(size) for size in fields["shape"])
    model = fields.get("model")
    spec = TensorSpec(dtype=fields["dtype"], shape=shape, model=None if model is None else _model(model))
    if 0 in shape or len(shape) > _MAX_AXES or spec.row_bytes >= _MAX_BYTES:
        raise ValueError(f"shape {_short(shape)} has an empty axis, too many axes, or too many values")
    return spec


def _model(fields: dict[str, Any]) -> ModelRecord:
    digest = fields["hash"]
    return ModelRecord(name=_text(fields["name"]), hash=None if digest is None else _text(digest))


def _columns(fields: dict[str, Any]) -> dict[str, ColumnSpec]:
    columns = {_text(name): _column_spec(value) for name, value in fields.items()}
    folded = [name.casefold() for name in columns]
    wrong = [name for name in columns if not name or "\0" in name or name.casefold() in RESERVED]
    if wrong:
        raise ValueError(f"a column cannot have the name {_short(wrong[0])}")
    _refuse_repeated("column, but for case,", folded)
    return columns


def _column_spec(fields: dict[str, Any]) -> ColumnSpec:
    if fields["type"] not in _COLUMN_TYPES:
        raise ValueError(f"column type {_short(fields['type'])} is none of {', '.join(_COLUMN_TYPES)}")
    return ColumnSpec(type=fields["type"], since=_text(fields["since"]))


def _count(value: object) -> int:
    if type(value) is int and 0 <= value < _MAX_BYTES:
        return value
    raise ValueError(f"{_short(value)} is not a whole number from 0 to 2^60")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_short(value)} is not text")
    value.encode()
    return value


def _match(pattern: re.Pattern[str], value: object) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{_short(value)} is not a valid name")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
