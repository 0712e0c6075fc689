"""Parts of a good size: small ones are joined, large ones split, deleted rows left out.

Every row keeps its number, and the parts of earlier snapshots stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from storage.deletion import install_deleted
from storage.disk import require_space, write_errors
from storage.errors import CommitConflictError, StorageError
from storage.integrity import list_files
from storage.manifest import Part, Snapshot
from storage.rewriting import PartRows, write_part
from storage.rows import RowMap
from storage.shards import ReaderPool
from storage.snapshots import hold_newest, publish
from storage.staging import Staging

__all__ = ["compact_parts"]

# A part that is a little too large is left alone: splitting it would cost more than it brings.
_TOLERANCE = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A part and what is left of it. live: int64 rows of the part; dropped: int64 numbers of deleted rows."""

    part: Part
    live: np.ndarray
    dropped: np.ndarray
    bytes: int


def compact_parts(pool: ReaderPool, max_part_bytes: int, message: str) -> Snapshot:
    """Publish a snapshot in which neighbouring parts of the same tensor columns are joined up to a size, and
    larger ones split.

    Raises:
        CommitConflictError: If another writer changed one of the parts meanwhile.
        StorageFullError: If the new parts do not fit the disk.
        StorageError: If the size is not positive.
    """
    if max_part_bytes < 1:
        raise StorageError(f"parts of {max_part_bytes} bytes cannot be made; give a size of 1 or more")
    base, lease = hold_newest(pool.backend)
    groups = list(_plan(pool, base, max_part_bytes))
    if not groups:
        return base
    staging = Staging(pool.backend)
    try:
        require_space(staging.path, sum(one.bytes for group in groups for one in group))
        with write_errors(staging.path):
            made = [
                _rewrite(pool, base, group, staging, f"{staging.id}{i:04x}", max_part_bytes)
                for i, group in enumerate(groups)
            ]
            staging.flush()
            return publish(
                pool.backend, lambda newest: _replaced(pool, newest, groups, made, staging, message)
            )
    except CommitConflictError:
        staging.withdraw()
        raise
    finally:
        staging.close()
        del lease


def _plan(pool: ReaderPool, snapshot: Snapshot, max_part_bytes: int) -> Iterator[list[_Candidate]]:
    """The runs of neighbours that are to be written anew."""
    row_map = RowMap(snapshot, pool)
    run: list[_Candidate] = []
    for part in snapshot.parts:
        one = _candidate(pool, row_map, part)
        fits = sum(other.bytes for other in run) + one.bytes <= max_part_bytes
        if run and not (fits and _layout(part) == _layout(run[-1].part)):
            if _is_worth_it(run, max_part_bytes):
                yield run
            run = []
        run.append(one)
    if run and _is_worth_it(run, max_part_bytes):
        yield run


def _candidate(pool: ReaderPool, row_map: RowMap, part: Part) -> _Candidate:
    numbers = pool.get(part).global_rows(np.arange(part.rows))
    gone = row_map.is_deleted(numbers)
    live = np.flatnonzero(~gone)
    num_bytes = sum(file.bytes for file in list_files(part)) * len(live) // part.rows
    return _Candidate(part=part, live=live, dropped=numbers[gone], bytes=num_bytes)


def _layout(part: Part) -> dict[str, bool]:
    """Tensor column -> whether every row has a value. Only parts that agree are joined: one file of a part
    without gaps can be handed out as it lies.
    """
    return {name: file.present is None for name, file in part.tensors.items()}


def _is_worth_it(run: Sequence[_Candidate], max_part_bytes: int) -> bool:
    if len(run) > 1 or len(run[0].dropped):
        return True
    return run[0].bytes > _TOLERANCE * max_part_bytes and len(run[0].live) > 1


def _rewrite(
    pool: ReaderPool,
    base: Snapshot,
    group: Sequence[_Candidate],
    staging: Staging,
    part_id: str,
    max_part_bytes: int,
) -> list[Part]:
    """The new parts of a group; none when all its rows are deleted."""
    pieces = _cut(pool, base, group, max_part_bytes)
    return [write_part(staging, f"{part_id}{i:04x}", base, piece) for i, piece in enumerate(pieces)]


def _cut(
    pool: ReaderPool, base: Snapshot, group: Sequence[_Candidate], max_part_bytes: int
) -> Iterator[list[PartRows]]:
    """The rows of a group, cut where pieces of about the same size come out."""
    total = sum(one.bytes for one in group)
    count = -(-total // max_part_bytes) if total > _TOLERANCE * max_part_bytes else 1
    sizes = np.concatenate([_row_bytes(pool, base, one) for one in group])
    cuts = np.searchsorted(np.cumsum(sizes), sizes.sum() * np.arange(1, count) / count)
    starts = np.cumsum([0, *(len(one.live) for one in group)])
    edges = np.unique(np.concatenate([[0], cuts, [len(sizes)]]))
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist()):
        sources = [
            PartRows(pool.get(one.part), one.live[max(first - start, 0) : max(last - start, 0)])
            for one, start in zip(group, starts.tolist())
        ]
        yield [source for source in sources if len(source.rows)]


def _row_bytes(pool: ReaderPool, base: Snapshot, one: _Candidate) -> np.ndarray:
    """About how many bytes each live row of a part takes, int64 (n,)."""
    part = one.part
    tensors = sum(base.tensors[name].row_bytes for name in part.tensors)
    index = (part.index.bytes + part.keys.bytes) // part.rows
    sizes: np.ndarray = pool.get(part).keys("always").blob_bytes[one.live] + tensors + index + 1
    return sizes


def _replaced(
    pool: ReaderPool,
    newest: Snapshot,
    groups: Sequence[Sequence[_Candidate]],
    made: Sequence[Sequence[Part]],
    staging: Staging,
    message: str,
) -> Snapshot:
    parts = list(newest.parts)
    for group, new in zip(groups, made):
        old = [one.part for one in group]
        at = next((i for i, held in enumerate(parts) if held.id == old[0].id), 0)
        if parts[at : at + len(old)] != old:
            raise CommitConflictError(
                f"{pool.backend.url}: another writer changed part {old[0].id} or one after it "
                "while they were compacted; compact again"
            )
        parts[at : at + len(old)] = new
    dropped = np.concatenate([one.dropped for group in groups for one in group])
    deleted = np.setdiff1d(pool.deleted_rows(newest), dropped, assume_unique=True)
    ref = install_deleted(staging, newest, deleted)
    return replace(newest, message=message, parts=tuple(parts), deleted=ref)
