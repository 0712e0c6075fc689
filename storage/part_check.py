"""Checking the files of one part: sizes, checksums, and whether they agree with each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from storage.backends.base import Backend
from storage.errors import StorageError
from storage.files import hash_descriptor
from storage.index_check import index_problems
from storage.manifest import FileRef, Part, Snapshot
from storage.shards import PartReader

__all__ = ["Problem", "broken_files", "file_problem", "list_files", "part_problems"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong. path: relative to the store; text: place, found, wanted."""

    path: str
    text: str


def list_files(part: Part) -> list[FileRef]:
    """All files of a part."""
    found = [part.index, part.keys, part.row_ids, part.blobs, *part.tensors.values()]
    found += [file.present for file in part.tensors.values()]
    return [ref for ref in found if ref is not None]


def file_problem(backend: Backend, ref: FileRef) -> str | None:
    """What is wrong with a file as a whole, by its size and checksum."""
    try:
        fd = backend.open_shard(ref)
    except StorageError as error:
        return str(error)
    try:
        found = hash_descriptor(fd)
    except OSError as error:
        return f"the file cannot be read: {error.strerror}"
    finally:
        os.close(fd)
    return None if found == ref.xxh3 else f"the checksum of the file is {found}, the snapshot says {ref.xxh3}"


def broken_files(backend: Backend, part: Part) -> dict[str, str]:
    """Path -> text for each file of a part that is not the one that was written."""
    return {ref.path: text for ref in list_files(part) if (text := file_problem(backend, ref))}


def part_problems(
    backend: Backend, part: Part, snapshot: Snapshot, broken: dict[str, str]
) -> Iterator[Problem]:
    """What is wrong with a part of which `broken` files are known, as exactly as it can be told."""
    reader = PartReader(backend, part)
    placed: set[str] = set()
    for problem in (*_damage(reader, snapshot, broken), *_disagreement(reader, snapshot, broken)):
        placed.add(problem.path)
        yield problem
    yield from (Problem(path=path, text=text) for path, text in broken.items() if path not in placed)


def _damage(reader: PartReader, snapshot: Snapshot, broken: dict[str, str]) -> Iterator[Problem]:
    """Where in a broken file the damage lies; it may also lie outside of all rows."""
    part = reader.part
    for name, file in part.tensors.items():
        if file.path in broken:
            try:
                texts = reader.tensor(name, snapshot.tensors[name]).damage()
            except StorageError as error:
                texts = [str(error)]
            yield from (Problem(path=file.path, text=text) for text in texts)
    if part.blobs is not None and part.blobs.path in broken and part.keys.path not in broken:
        for row in range(part.rows):
            try:
                reader.blob(row, "always")
            except StorageError as error:
                yield Problem(path=part.blobs.path, text=str(error))
                if "bytes from byte" not in str(error):
                    break


def _disagreement(reader: PartReader, snapshot: Snapshot, broken: dict[str, str]) -> Iterator[Problem]:
    """Files that are as they were written, but do not say the same."""
    part, backend = reader.part, reader.backend
    row_file = part.row_ids.path if part.row_ids else part.index.path
    if not {part.index.path, part.keys.path, row_file} & broken.keys():
        yield from (Problem(path=part.index.path, text=text) for text in index_problems(backend, part))
    for name, file in part.tensors.items():
        if file.path not in broken:
            text = _tensor_text(reader, name, snapshot)
            if text:
                yield Problem(path=file.path, text=text)


def _tensor_text(reader: PartReader, name: str, snapshot: Snapshot) -> str | None:
    """What an Arrow file says of itself that differs from the snapshot."""
    file, spec = reader.part.tensors[name], snapshot.tensors[name]
    try:
        batch = pa.ipc.open_file(pa.py_buffer(reader.backend.map(file)[0])).get_batch(0)
    except StorageError as error:
        return str(error)
    except (pa.ArrowException, ValueError) as error:
        return f"the file is no Arrow file: {error}"
    if batch.num_rows != file.rows:
        return f"{batch.num_rows} rows, the snapshot says {file.rows}"
    shape = tuple(batch.schema.field(0).type.shape)
    return None if shape == spec.shape else f"rows of shape {shape}, the snapshot says {spec.shape}"
