"""Proof that a snapshot is whole: every file against its size, checksum and rows."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from storage.backends.base import Backend
from storage.errors import StorageError
from storage.files import hash_descriptor
from storage.manifest import FileRef, Part, Snapshot
from storage.shards import PartReader
from storage.snapshots import list_snapshot_ids, read_snapshot

__all__ = ["Problem", "VerifyReport", "verify_store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong. path: relative to the store; text: place, found, wanted."""

    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a check found.

    files, bytes: what was read.
    """

    problems: list[Problem]
    files: int
    bytes: int

    @property
    def ok(self) -> bool:
        """True when nothing is wrong."""
        return not self.problems


def verify_store(backend: Backend, snapshot: Snapshot) -> VerifyReport:
    """Check all files of a snapshot, and that every other snapshot file can be read."""
    problems = []
    for number in list_snapshot_ids(backend):
        try:
            read_snapshot(backend, number)
        except StorageError as error:
            problems.append(Problem(path=f"snapshots/{number:08d}.json", text=str(error)))
    refs = [*snapshot.quarantine, *([snapshot.deleted] if snapshot.deleted else [])]
    alone = list(refs)
    for part in snapshot.parts:
        refs += list_files(part)
        problems += _verify_part(backend, part, snapshot)
    problems += [Problem(path=ref.path, text=text) for ref in alone if (text := _file_problem(backend, ref))]
    return VerifyReport(problems=problems, files=len(refs), bytes=sum(ref.bytes for ref in refs))


def list_files(part: Part) -> list[FileRef]:
    """All files of a part."""
    found = [part.index, part.keys, part.row_ids, part.blobs, *part.tensors.values()]
    return [ref for ref in found if ref is not None]


def _verify_part(backend: Backend, part: Part, snapshot: Snapshot) -> list[Problem]:
    broken = {ref.path: text for ref in list_files(part) if (text := _file_problem(backend, ref))}
    reader = PartReader(backend, part)
    problems: list[Problem] = []
    if part.index.path not in broken:
        problems += _index_problems(backend, part)
    for name, file in part.tensors.items():
        if file.path in broken:
            problems += _tensor_problems(reader, name, snapshot)
    if part.blobs is not None and part.blobs.path in broken and part.keys.path not in broken:
        problems += _blob_problems(reader)
    placed = {problem.path for problem in problems}
    return problems + [Problem(path=path, text=text) for path, text in broken.items() if path not in placed]


def _file_problem(backend: Backend, ref: FileRef) -> str | None:
    try:
        fd = backend.open_shard(ref)
    except StorageError as error:
        return str(error)
    try:
        found = hash_descriptor(fd)
    finally:
        os.close(fd)
    return None if found == ref.xxh3 else f"the checksum of the file is {found}, the snapshot says {ref.xxh3}"


def _index_problems(backend: Backend, part: Part) -> list[Problem]:
    try:
        with pq.ParquetFile(backend.local_file(part.index)) as file:
            rows = file.metadata.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        return [Problem(path=part.index.path, text=f"the file is no Parquet file: {error}")]
    if rows == part.rows:
        return []
    return [Problem(path=part.index.path, text=f"{rows} rows, the snapshot says {part.rows}")]


def _tensor_problems(reader: PartReader, name: str, snapshot: Snapshot) -> list[Problem]:
    """The blocks of a damaged file that differ; the damage may also lie outside of all blocks."""
    path = reader.part.tensors[name].path
    try:
        shard = reader.tensor(name, snapshot.tensors[name])
        return [Problem(path=path, text=text) for text in shard.damage()]
    except StorageError as error:
        return [Problem(path=path, text=str(error))]


def _blob_problems(reader: PartReader) -> list[Problem]:
    """The blobs of a damaged file that differ; the damage may also lie in LMDB's own pages."""
    assert reader.part.blobs is not None
    problems = []
    for row in range(reader.part.rows):
        try:
            reader.blob(row, "always")
        except StorageError as error:
            problems.append(Problem(path=reader.part.blobs.path, text=str(error)))
            if "bytes from byte" not in str(error):
                break
    return problems
