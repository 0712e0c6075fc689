"""Snapshots as JSON: written with a checksum, read with suspicion."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from typing import Any

import xxhash

from storage.errors import FormatVersionError, ManifestError
from storage.manifest import FILE_NAME, Part, Snapshot, TensorSpec
from storage.manifest_fields import (
    read_columns,
    read_count,
    read_file,
    read_match,
    read_optional_file,
    read_tensor_file,
    read_tensor_spec,
    read_text,
    refuse_repeated,
    short_repr,
)

__all__ = ["FORMAT_VERSION", "decode_snapshot", "encode_snapshot"]

FORMAT_VERSION = 2
_READABLE_VERSIONS = (1, 2)
_MIN_KEY_BYTES = 32
"""Each row takes more than this in its key table, so a count of rows cannot be larger than its files."""
_CHECKSUM_MARK = b',\n"checksum": "'
_PART_ID = re.compile(r"[0-9a-z]{1,64}")


# id -> the part and its JSON, of the snapshot that was encoded last: a commit adds one part to many old ones.
_part_texts: dict[str, tuple[Part, str]] = {}


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """The bytes of a snapshot file: a JSON object that ends with the checksum of all bytes before."""
    members = {"format": _dumps(FORMAT_VERSION)}
    for field in dataclass_fields(Snapshot):
        value = getattr(snapshot, field.name)
        if field.name == "parts":
            members[field.name] = "[\n" + ",\n".join(_part_jsons(snapshot.parts)) + "\n]"
        elif isinstance(value, tuple):
            members[field.name] = "[\n" + ",\n".join(_dumps(item) for item in value) + "\n]"
        else:
            members[field.name] = _dumps(value)
    body = ("{\n" + ",\n".join(f'"{name}": {text}' for name, text in members.items())).encode()
    return body + _CHECKSUM_MARK + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n'


def _part_jsons(parts: tuple[Part, ...]) -> list[str]:
    global _part_texts
    known, texts = _part_texts, {}
    for part in parts:
        found = known.get(part.id)
        texts[part.id] = found if found is not None and found[0] is part else (part, _dumps(part))
    if texts:
        _part_texts = texts
    return [text for _, text in texts.values()]


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
            f"{place}: the snapshot is cut short or damaged ({short_repr(str(error))}); open an earlier one"
        ) from None
    if not isinstance(fields, dict) or "format" not in fields:
        raise ManifestError(f"{place}: this is not a snapshot of a feature store")
    if type(fields["format"]) is not int or fields["format"] not in _READABLE_VERSIONS:
        raise FormatVersionError(
            f"{place}: the store has format {short_repr(fields['format'])}, this version reads formats "
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
    tensors = {
        read_match(FILE_NAME, name): read_tensor_spec(value) for name, value in fields["tensors"].items()
    }
    parts = tuple(_part(value, tensors) for value in fields["parts"])
    snapshot = Snapshot(
        id=read_count(fields["id"]),
        parent=None if fields["parent"] is None else read_count(fields["parent"]),
        created=read_text(fields["created"]),
        message=read_text(fields["message"]),
        num_rows=read_count(fields["num_rows"]),
        next_row=read_count(fields["next_row"]),
        columns=read_columns(fields["columns"]),
        tensors=tensors,
        parts=parts,
        deleted=read_optional_file(fields["deleted"], "index"),
        quarantine=tuple(read_file(value, "quarantine") for value in fields["quarantine"]),
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
    refuse_repeated("part", (part.id for part in snapshot.parts))
    files = [*snapshot.quarantine, snapshot.deleted]
    for part in snapshot.parts:
        files += [part.index, part.keys, part.row_ids, part.blobs, *part.tensors.values()]
        files += [tensor.present for tensor in part.tensors.values()]
    refuse_repeated("file", (file.path for file in files if file is not None))


def _part(fields: dict[str, Any], specs: Mapping[str, TensorSpec]) -> Part:
    part = Part(
        id=read_match(_PART_ID, fields["id"]),
        first_row=read_count(fields["first_row"]),
        end_row=read_count(fields["end_row"]),
        rows=read_count(fields["rows"]),
        row_ids=read_optional_file(fields["row_ids"], "index"),
        index=read_file(fields["index"], "index"),
        keys=read_file(fields["keys"], "index"),
        blobs=read_optional_file(fields["blobs"], "blobs"),
        tensors={name: read_tensor_file(value, name, specs) for name, value in fields["tensors"].items()},
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
