"""Tensor columns that are computed after the rows were written."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from storage.disk import write_errors
from storage.errors import CommitConflictError, TensorColumnError
from storage.feature_journal import FeatureJournal, open_journal
from storage.feature_values import Values, collect_values, compute_values
from storage.manifest import ModelRecord, Part, Snapshot, TensorFile, TensorSpec
from storage.part_builder import seal_tensor
from storage.snapshots import check_publishable, publish
from storage.staging import Staging
from storage.tensors import TensorSpool
from storage.value_log import ValueLog

if TYPE_CHECKING:
    from storage.store import FeatureStore

__all__ = ["ColumnRequest", "add_tensor_column"]

_MAX_ATTEMPTS = 5
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRequest:
    """What `FeatureStore.add_column` was asked for. sparse: rows may stay without a value."""

    name: str
    spec: TensorSpec
    message: str
    sparse: bool
    workers: int | Executor
    progress: Callable[[int, int], None] | None


class _PartsChangedError(CommitConflictError):
    """Another writer joined or removed parts; the values still hold."""


def add_tensor_column(store: FeatureStore, values: Values, request: ColumnRequest) -> Snapshot:
    """Write values for the rows of `store` (its newest snapshot) that have none, and publish them."""
    _check_spec(store.snapshot, request)
    schema = {**store.snapshot.tensors, request.name: request.spec}
    check_publishable(store.url, replace(store.snapshot, message=request.message, tensors=schema))
    rows = _rows_without(store, request.name)
    if not len(store):
        raise TensorColumnError(f"{store.url}: there are no rows yet; append rows before a column")
    if not len(rows):
        raise TensorColumnError(
            f"{store.url}: every row has a tensor {request.name!r} already; use another name"
        )
    journal = open_journal(store, request, values)
    is_done = False
    try:
        if callable(values):
            compute_values(store, rows, journal.log, values, request)
        else:
            collect_values(store, rows, journal.log, values, request)
        snapshot = _publish(store, rows, journal, request)
        is_done = True
    except CommitConflictError:
        is_done = True
        raise
    finally:
        journal.close(keep=callable(values) and not is_done)
    return snapshot


def _check_spec(snapshot: Snapshot, request: ColumnRequest) -> None:
    known = snapshot.tensors.get(request.name)
    if known is None:
        return
    spec = request.spec
    if known != spec:
        raise TensorColumnError(
            f"tensor column {request.name!r} is {known.dtype}{known.shape} in snapshot {snapshot.id}, not "
            f"{spec.dtype}{spec.shape}; convert the values, or use another name"
        )
    if known.model != spec.model:
        raise TensorColumnError(
            f"tensor column {request.name!r} was computed by {_said(known.model)}, these values are by "
            f"{_said(spec.model)}; use another name, or drop the column first"
        )


def _said(model: ModelRecord | None) -> str:
    return "a model that was not named" if model is None else f"model {model.name!r} (hash {model.hash})"


def _rows_without(store: FeatureStore, name: str) -> np.ndarray:
    """The rows that have no value, int64 (n,) ascending."""
    rows = store.row_map.live_rows()
    return rows[~store.tensor(name).has(rows)] if name in store.snapshot.tensors else rows


def _publish(
    store: FeatureStore, rows: np.ndarray, journal: FeatureJournal, request: ColumnRequest
) -> Snapshot:
    """Publish the logged values of `rows`; begin again when another writer joined their parts meanwhile."""
    for _ in range(_MAX_ATTEMPTS):
        staging = Staging(store.backend)
        try:
            with write_errors(staging.path):
                files = _seal_parts(store, rows, journal.log, staging, request)
            staging.flush()
            base = {part.id: part for part in store.snapshot.parts if part.id in files}
            return publish(store.backend, lambda newest: _with_column(newest, base, files, request))  # noqa: B023
        except _PartsChangedError:
            staging.withdraw()
            store = store.refresh()
        except (CommitConflictError, TensorColumnError):
            staging.withdraw()
            raise
        finally:
            staging.close()
    raise CommitConflictError(
        f"{store.url}: other writers changed the parts {_MAX_ATTEMPTS} times while tensor {request.name!r} "
        "was written; try again when they are through"
    )


def _seal_parts(
    store: FeatureStore, rows: np.ndarray, log: ValueLog, staging: Staging, request: ColumnRequest
) -> dict[str, TensorFile]:
    """Part id -> the file that holds the values that the part had and those that it gets."""
    logged, offsets = log.sorted_rows()
    wanted = np.isin(logged, rows, assume_unique=True) & (offsets >= 0)
    logged, offsets = logged[wanted], offsets[wanted]
    files = {}
    for i, part in enumerate(store.snapshot.parts):
        first, end = logged.searchsorted([part.first_row, part.end_row])
        if first == end:
            continue
        spool = TensorSpool(request.name, request.spec, staging.path / f"{part.id}.spool")
        try:
            found = _merge_part(store, i, logged[first:end], offsets[first:end], log, spool)
            file = seal_tensor(staging, spool, f"{part.id}-{staging.id}") if found else None
        finally:
            spool.close()
        if file is not None:
            files[part.id] = file
    return files


def _merge_part(
    store: FeatureStore, part: int, logged: np.ndarray, offsets: np.ndarray, log: ValueLog, spool: TensorSpool
) -> bool:
    """Spool one part: old values, new ones, and zeros for deleted rows where no other row lacks a value."""
    ids = store.row_map.part_rows(part)
    new = np.full(len(ids), -1, np.int64)
    at = np.minimum(logged.searchsorted(ids), len(logged) - 1)
    is_new = logged[at] == ids
    new[is_new] = offsets[at[is_new]]
    shard = None
    old = np.full(len(ids), -1, np.int64)
    if spool.name in store.snapshot.parts[part].tensors:
        shard = store.part(part).tensor(spool.name, spool.spec)
        old = shard.positions(np.arange(len(ids)))
    new[old >= 0] = -1
    if not (new >= 0).any():
        return False
    has = (old >= 0) | (new >= 0)
    is_filled = bool((has | store.row_map.is_deleted(ids)).all())
    kind = np.where(new >= 0, 2, np.where(old >= 0, 1, 0))
    step = max(1, _CHUNK_BYTES // spool.spec.row_bytes)
    for run in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(kind)) + 1):
        for start in range(0, len(run), step):
            chunk = run[start : start + step]
            if kind[run[0]] == 2:
                for data in log.read(new[chunk]):
                    spool.append(memoryview(data))
            elif kind[run[0]] == 1 and shard is not None:
                shard.check(old[chunk], "always")
                spool.append(spool.check(shard.array[old[chunk]], spool.name, rows=len(chunk)))
            elif is_filled:
                spool.append(memoryview(bytes(len(chunk) * spool.spec.row_bytes)))
            else:
                spool.skip(len(chunk))
    return True


def _with_column(
    newest: Snapshot, base: dict[str, Part], files: dict[str, TensorFile], request: ColumnRequest
) -> Snapshot:
    name = request.name
    _check_spec(newest, request)
    held = {part.id: part for part in newest.parts}
    taken = [i for i in files if i in held and held[i].tensors.get(name) != base[i].tensors.get(name)]
    if taken:
        raise CommitConflictError(
            f"another writer wrote tensor {name!r} for part {taken[0]} meanwhile; nothing was committed"
        )
    if files.keys() - held.keys():
        raise _PartsChangedError(
            f"another writer removed the rows of tensor {name!r} for part "
            f"{min(files.keys() - held.keys())} meanwhile; nothing was committed"
        )
    parts = tuple(
        replace(part, tensors={**part.tensors, name: files[part.id]}) if part.id in files else part
        for part in newest.parts
    )
    return replace(
        newest, message=request.message, tensors={**newest.tensors, name: request.spec}, parts=parts
    )
