"""WebDataset tars: the members of a sample stand together and share a name up to its first dot.

A sample has `<name>.json` with its key and metadata, `<name>.txt` with its caption, `<name>.<ending>` with
its blob and `<name>.<tensor>.npy` for each tensor. The name is the key; what WebDataset or a file system
would take for something else is written as %XX. Metadata of type json is nested in the JSON.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from storage.blobs import Blob
from storage.columns import ARROW_TYPES
from storage.errors import CorruptionError
from storage.exchange.batches import RowBatch, TensorRows
from storage.exchange.media import media_ending
from storage.exchange.record import ExportRecord
from storage.manifest import TensorSpec

__all__ = ["read_tars", "sample_name", "write_tars"]

CAPTION = "caption"
_UNSAFE = re.compile(r"[^\w/ ,;=+@~#()\[\]-]", re.ASCII)
_MAX_STEP_BYTES = 200
_NPY = ".npy"
_BATCH_ROWS = 1024
_BATCH_BYTES = 16 << 20


def sample_name(key: str) -> str:
    """The name of a key's members: without dots, and a path in its folder. No two keys share one."""
    quoted = "".join(
        c if c.isalnum() else _UNSAFE.sub(lambda match: "".join(f"%{b:02X}" for b in match[0].encode()), c)
        for c in key
    )
    steps = quoted.split("/")
    if all(steps) and all(len(step.encode()) <= _MAX_STEP_BYTES for step in steps):
        return quoted
    return f"%%{hashlib.sha256(key.encode()).hexdigest()}"


def write_tars(folder: Path, batches: Iterator[RowBatch], record: ExportRecord, file_bytes: int) -> list[str]:
    """Write the rows to `shard-000000.tar` and so on, of up to `file_bytes` where a sample fits.

    Returns:
        The names of the files.
    """
    names: list[str] = []
    tar: tarfile.TarFile | None = None
    try:
        for batch in batches:
            for i, row in enumerate(batch.rows()):
                members = _members(batch, i, row, record.columns)
                size = sum(_stored_bytes(content) for content in members.values())
                if tar is None or (tar.offset and tar.offset + size > file_bytes):
                    if tar is not None:
                        tar.close()
                    names.append(f"shard-{len(names):06d}.tar")
                    tar = tarfile.open(folder / names[-1], "x", format=tarfile.PAX_FORMAT)  # noqa: SIM115
                _add_sample(tar, sample_name(batch.keys[i]), members)
    finally:
        if tar is not None:
            tar.close()
    return names


def _members(batch: RowBatch, i: int, row: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Blob]:
    """Ending -> content of the members of a sample."""
    values = {
        name: json.loads(value) if types[name] == "json" and value is not None else value
        for name, value in row.items()
    }
    text = {"key": batch.keys[i], **values}
    caption = text.pop(CAPTION) if types.get(CAPTION) == "string" and values[CAPTION] is not None else None
    members: dict[str, Blob] = {"json": json.dumps(text, ensure_ascii=False).encode()}
    if caption is not None:
        members["txt"] = caption.encode()
    blob = batch.blobs[i]
    if blob is not None:
        members[media_ending(blob)] = blob
    for name, ending in _tensor_endings(batch.tensors).items():
        if batch.tensors[name].present[i]:
            content = io.BytesIO()
            np.lib.format.write_array(content, batch.tensors[name].values[i], allow_pickle=False)
            members[ending] = content.getbuffer()
    return members


def _tensor_endings(tensors: Mapping[str, object]) -> dict[str, str]:
    """WebDataset makes endings lower-case, so that names which differ in case only need a number."""
    endings: dict[str, str] = {}
    for number, name in enumerate(tensors):
        taken = {ending.casefold() for ending in endings.values()}
        ending = name + _NPY
        endings[name] = f"{name}-{number}{_NPY}" if ending.casefold() in taken else ending
    return endings


def _stored_bytes(content: Blob) -> int:
    """What a member takes in a tar, names of usual length assumed."""
    return 512 + -(-memoryview(content).nbytes // 512) * 512


def _add_sample(tar: tarfile.TarFile, name: str, members: Mapping[str, Blob]) -> None:
    for ending, content in members.items():
        info = tarfile.TarInfo(f"{name}.{ending}")
        info.size = memoryview(content).nbytes
        tar.addfile(info, io.BytesIO(content))


def read_tars(folder: Path, record: ExportRecord) -> Iterator[RowBatch]:
    """The rows of the tars."""
    for file in record.files:
        samples: list[dict[str, bytes]] = []
        held = 0
        for sample in _read_samples(folder / file):
            samples.append(sample)
            held += sum(map(len, sample.values()))
            if held >= _BATCH_BYTES or len(samples) >= _BATCH_ROWS:
                yield _batch(samples, record, folder / file)
                samples, held = [], 0
        if samples:
            yield _batch(samples, record, folder / file)


def _read_samples(path: Path) -> Iterator[dict[str, bytes]]:
    """Ending -> content of each sample of a tar."""
    name: tuple[str, str] | None = None
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                base, _, file = info.name.rpartition("/")
                stem, _, ending = file.partition(".")
                content = tar.extractfile(info)
                if content is None:
                    continue
                if members and (base, stem) != name:
                    yield members
                    members = {}
                name = (base, stem)
                members[ending] = content.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise CorruptionError(f"{path}: the tar is damaged: {error}; export again") from error
    if members:
        yield members


def _batch(samples: list[dict[str, bytes]], record: ExportRecord, path: Path) -> RowBatch:
    keys: list[str] = []
    rows: list[dict[str, Any]] = []
    tensors: dict[str, list[bytes | None]] = {name: [] for name in record.tensors}
    try:
        for members in samples:
            row = json.loads(members.pop("json"))
            keys.append(row.pop("key"))
            if "txt" in members:
                row[CAPTION] = members.pop("txt").decode()
            rows.append(row)
            for name, ending in _tensor_endings(record.tensors).items():
                tensors[name].append(members.pop(ending, None))
        return RowBatch(
            keys=keys,
            blobs=[next(iter(members.values()), None) for members in samples],
            columns=pa.table({name: _column(rows, name, kind) for name, kind in record.columns.items()}),
            tensors={name: _tensor_rows(found, record.tensors[name]) for name, found in tensors.items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptionError(
            f"{path}: a sample is not as it was exported: {error!r}; export again"
        ) from error


def _column(rows: Sequence[Mapping[str, Any]], name: str, kind: str) -> pa.Array:
    values = [row.get(name) for row in rows]
    if kind == "json":
        values = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    return pa.array(values, ARROW_TYPES[kind])


def _tensor_rows(contents: Sequence[bytes | None], spec: TensorSpec) -> TensorRows:
    values = np.zeros((len(contents), *spec.shape), spec.dtype)
    for i, content in enumerate(contents):
        if content is not None:
            value = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
            if value.dtype != values.dtype or value.shape != spec.shape:
                raise ValueError(f"a tensor is {value.dtype}{value.shape}, not {spec.dtype}{spec.shape}")
            values[i] = value
    return TensorRows(values=values, present=np.array([content is not None for content in contents], bool))
