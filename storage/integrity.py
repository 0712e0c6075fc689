"""Proof that a snapshot is whole: every file against its size, checksum and rows, and against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from storage.backends.base import Backend
from storage.deep_check import Decoders, database_problems, decoding_problems, key_problems
from storage.errors import SnapshotNotFoundError, StorageError
from storage.manifest import Snapshot
from storage.part_check import Problem, broken_files, file_problem, list_files, part_problems
from storage.rows import RowMap
from storage.shards import PartReader, ReaderPool
from storage.snapshots import list_snapshot_ids, read_snapshot, snapshot_name

__all__ = ["Problem", "Progress", "VerifyReport", "list_files", "snapshot_problems", "verify_store"]

Progress = Callable[[int, int], None]
"""Is called with what is done and what there is to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a check found.

    files, bytes: what was read.
    decoded: blobs that a decoder looked at.
    """

    problems: list[Problem]
    files: int
    bytes: int
    decoded: int = 0

    @property
    def ok(self) -> bool:
        """True when nothing is wrong."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return {"ok": self.ok, **asdict(self)}


def verify_store(
    backend: Backend, snapshot: Snapshot, *, deep: Decoders | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Check all files of a snapshot, and that every other snapshot file can be read.

    Args:
        backend: Where the store lies.
        snapshot: What is checked.
        deep: Also compare the blobs with what the LMDB library finds, and decode those for which there is a
            decoder.
        progress: Is told bytes; a deep check goes through the blobs once more.
    """
    alone = [*snapshot.quarantine, *([snapshot.deleted] if snapshot.deleted else [])]
    files = [*alone, *(ref for part in snapshot.parts for ref in list_files(part))]
    num_bytes = sum(ref.bytes for ref in files)
    blob_bytes = [part.blobs.bytes if part.blobs else 0 for part in snapshot.parts]
    total = num_bytes + (0 if deep is None else sum(blob_bytes))
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    problems = snapshot_problems(backend)
    for ref in alone:
        problems += [Problem(path=ref.path, text=text)] if (text := file_problem(backend, ref)) else []
        advance(ref.bytes)
    whole: list[PartReader] = []
    for part in snapshot.parts:
        broken = broken_files(backend, part)
        problems += part_problems(backend, part, snapshot, broken)
        whole += [] if broken else [PartReader(backend, part)]
        advance(sum(ref.bytes for ref in list_files(part)))
    decoded = 0
    if snapshot.deleted is None or snapshot.deleted.path not in {problem.path for problem in problems}:
        row_map = RowMap(snapshot, ReaderPool(backend, whole))
        problems += _repeated_keys(whole, row_map)
        for reader in whole if deep is not None else ():
            assert deep is not None
            found, count = _deep_problems(reader, row_map, snapshot, deep)
            problems += found
            decoded += count
            advance(reader.part.blobs.bytes if reader.part.blobs else 0)
    return VerifyReport(problems=problems, files=len(files), bytes=num_bytes, decoded=decoded)


def snapshot_problems(backend: Backend) -> list[Problem]:
    """The snapshot files that cannot be read."""
    problems = []
    for number in list_snapshot_ids(backend):
        try:
            read_snapshot(backend, number)
        except SnapshotNotFoundError:
            continue  # gc removed it since.
        except StorageError as error:
            problems.append(Problem(path=snapshot_name(number), text=str(error)))
    return problems


def _repeated_keys(readers: Sequence[PartReader], row_map: RowMap) -> Iterator[Problem]:
    """Keys that two rows have which can be read."""
    tables = [reader.keys("never") for reader in readers]
    hashes = np.sort(np.concatenate([np.empty(0, np.uint64), *(table.sorted_hash for table in tables)]))
    for shared in np.unique(hashes[1:][hashes[1:] == hashes[:-1]]).tolist():
        seen: dict[bytes, int] = {}
        for reader, table in zip(readers, tables):
            rows = table.rows_of_hash(shared)
            rows = rows[~row_map.is_deleted(reader.global_rows(rows))]
            for row, number in zip(rows.tolist(), reader.global_rows(rows).tolist()):
                key = table.encoded_key(row)
                if key in seen:
                    text = f"row {number} has the key {key.decode()!r} of row {seen[key]}"
                    yield Problem(path=reader.part.keys.path, text=text)
                seen[key] = number


def _deep_problems(
    reader: PartReader, row_map: RowMap, snapshot: Snapshot, decoders: Decoders
) -> tuple[list[Problem], int]:
    part = reader.part
    problems = [Problem(path=part.keys.path, text=text) for text in key_problems(reader)]
    if part.blobs is None:
        return problems, 0
    problems += [Problem(path=part.blobs.path, text=text) for text in database_problems(reader)]
    live = np.flatnonzero(~row_map.is_deleted(reader.global_rows(np.arange(part.rows))))
    decoded = 0
    for text in decoding_problems(reader, live, snapshot, decoders):
        decoded += 1
        problems += [Problem(path=part.blobs.path, text=text)] if text else []
    return problems, decoded
