"""Joining small parts and leaving deleted rows out; every row keeps its number."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from storage.arrow_numpy import from_numpy
from storage.columns import ARROW_TYPES, Scalar
from storage.deletion import install_deleted
from storage.errors import CommitConflictError
from storage.integrity import list_files
from storage.keys import hash_key
from storage.leases import hold_snapshot
from storage.manifest import Part, Snapshot
from storage.part_builder import PartBuilder
from storage.rows import RowMap
from storage.shards import PartReader, ReaderPool
from storage.snapshots import newest_snapshot, publish
from storage.staging import Staging

__all__ = ["compact_parts"]

_CHUNK_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Neighbouring parts that become one. live: per part, int64 rows of the part that are kept."""

    parts: tuple[Part, ...]
    live: tuple[np.ndarray, ...]
    dropped: np.ndarray
    """int64, numbers of the deleted rows that are left out."""


def compact_parts(pool: ReaderPool, max_part_bytes: int, message: str) -> Snapshot:
    """Publish a snapshot in which neighbouring parts of the same tensor columns are joined up to a size.

    Raises:
        CommitConflictError: If another writer changed one of the parts meanwhile.
    """
    base = newest_snapshot(pool.backend)
    lease = hold_snapshot(pool.backend, base.id)
    groups = _plan(pool, base, max_part_bytes)
    if not groups:
        return base
    staging = Staging(pool.backend)
    try:
        joined = [_join(pool, base, group, staging, f"{staging.id}{i:04x}") for i, group in enumerate(groups)]
        staging.flush()
        try:
            return publish(
                pool.backend, lambda newest: _replaced(pool, newest, groups, joined, staging, message)
            )
        except CommitConflictError:
            staging.withdraw()
            raise
    finally:
        staging.close()
        del lease


def _plan(pool: ReaderPool, snapshot: Snapshot, max_part_bytes: int) -> list[_Group]:
    runs: list[list[Part]] = []
    size = 0
    for part in snapshot.parts:
        part_bytes = sum(file.bytes for file in list_files(part))
        if (
            runs
            and runs[-1][-1].tensors.keys() == part.tensors.keys()
            and size + part_bytes <= max_part_bytes
        ):
            runs[-1].append(part)
            size += part_bytes
        else:
            runs.append([part])
            size = part_bytes
    groups = [_group(pool, snapshot, run) for run in runs]
    return [group for group in groups if len(group.parts) > 1 or len(group.dropped)]


def _group(pool: ReaderPool, snapshot: Snapshot, parts: list[Part]) -> _Group:
    row_map = RowMap(snapshot, pool)
    live, dropped = [], [np.empty(0, np.int64)]
    for part in parts:
        rows = pool.get(part).global_rows(np.arange(part.rows))
        gone = row_map.is_deleted(rows)
        live.append(np.flatnonzero(~gone))
        dropped.append(rows[gone])
    return _Group(parts=tuple(parts), live=tuple(live), dropped=np.concatenate(dropped))


def _join(pool: ReaderPool, base: Snapshot, group: _Group, staging: Staging, part_id: str) -> Part | None:
    """The new part of a group; None when all its rows are deleted."""
    readers = [pool.get(part) for part in group.parts]
    row_ids = np.concatenate([reader.global_rows(live) for reader, live in zip(readers, group.live)])
    if not len(row_ids):
        return None
    types = {name: spec.type for name, spec in base.columns.items()}
    is_sparse = int(row_ids[-1] - row_ids[0]) + 1 != len(row_ids)
    if is_sparse:
        types["row"] = "int"
    builder = PartBuilder(staging, part_id, lambda: types)
    try:
        for name in group.parts[0].tensors:
            builder.add_tensor(name, base.tensors[name])
        for reader, live in zip(readers, group.live):
            _copy_rows(reader, live, builder, types)
            _copy_tensors(reader, live, builder)
        return builder.seal(row_ids)
    finally:
        builder.close()


def _copy_rows(reader: PartReader, live: np.ndarray, builder: PartBuilder, types: dict[str, str]) -> None:
    keys = reader.keys("always")
    names = [name for name, kind in types.items() if kind != "null" and name != "row"]
    for start in range(0, len(live), _CHUNK_ROWS):
        chunk = live[start : start + _CHUNK_ROWS]
        columns: dict[str, list[Scalar]] = {
            name: reader.column(name, ARROW_TYPES[types[name]], "always").take(from_numpy(chunk)).to_pylist()
            for name in names
        }
        if "row" in types:
            columns["row"] = reader.global_rows(chunk).tolist()
        for i, row in enumerate(chunk.tolist()):
            key = keys.encoded_key(row)
            values = {name: column[i] for name, column in columns.items()}
            builder.add(key, hash_key(key), reader.blob(row, "always"), values)


def _copy_tensors(reader: PartReader, live: np.ndarray, builder: PartBuilder) -> None:
    for name, spool in builder.tensors.items():
        shard = reader.tensor(name, spool.spec)
        for run in np.split(live, np.flatnonzero(np.diff(live) != 1) + 1):
            for start in range(0, len(run), _CHUNK_ROWS):
                rows = slice(int(run[start]), int(run[min(start + _CHUNK_ROWS, len(run)) - 1]) + 1)
                shard.check(rows, "always")
                spool.append(spool.check(shard.array[rows], name, rows=rows.stop - rows.start))


def _replaced(
    pool: ReaderPool,
    newest: Snapshot,
    groups: list[_Group],
    joined: list[Part | None],
    staging: Staging,
    message: str,
) -> Snapshot:
    parts = list(newest.parts)
    for group, part in zip(groups, joined):
        at = next((i for i, held in enumerate(parts) if held.id == group.parts[0].id), 0)
        if tuple(parts[at : at + len(group.parts)]) != group.parts:
            raise CommitConflictError(
                f"{pool.backend.url}: another writer changed part {group.parts[0].id} or one after it "
                "while they were compacted; compact again"
            )
        parts[at : at + len(group.parts)] = [] if part is None else [part]
    dropped = np.concatenate([group.dropped for group in groups])
    deleted = np.setdiff1d(pool.deleted_rows(newest), dropped, assume_unique=True)
    ref = install_deleted(staging, newest, deleted)
    return replace(newest, message=message, parts=tuple(parts), deleted=ref)
