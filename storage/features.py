"""Tensor columns that are computed after the rows were written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from storage.errors import CommitConflictError, DuplicateKeyError, TensorColumnError
from storage.manifest import Part, Snapshot, TensorFile, TensorSpec
from storage.snapshots import newest_snapshot, publish
from storage.staging import Staging
from storage.tensors import TensorSpool
from storage.view import View
from storage.writer import seal_tensor

if TYPE_CHECKING:
    from storage.store import FeatureStore

__all__ = ["Values", "add_tensor_column"]

Values = Iterable[tuple[str, np.ndarray]] | Callable[[View], np.ndarray]

_CHUNK_ROWS = 1024


def add_tensor_column(
    store: FeatureStore, name: str, values: Values, spec: TensorSpec, message: str
) -> Snapshot:
    """Write the column for every part of `store` (its newest snapshot) that lacks it, and publish it."""
    parts = [i for i, part in enumerate(store.snapshot.parts) if name not in part.tensors]
    if not parts:
        raise TensorColumnError(f"{store.path}: every row has a tensor {name!r} already; use another name")
    known = store.snapshot.tensors.get(name, spec)
    if known != spec:
        raise TensorColumnError(
            f"tensor column {name!r} is {known.dtype}{known.shape}, not {spec.dtype}{spec.shape}"
        )
    staging = Staging(store.path)
    spools = {i: TensorSpool(name, spec, staging.path / f"{name}-{i}.spool") for i in parts}
    try:
        if callable(values):
            for i in parts:
                _fill_part(store, i, spools[i], values)
        else:
            _fill_by_key(store, spools, values)
        files = {
            store.snapshot.parts[i].id: _seal(staging, store.snapshot.parts[i], spools[i]) for i in parts
        }
        staging.flush()
        try:
            return publish(store.path, lambda newest: _with_column(newest, name, spec, files, message))
        except (CommitConflictError, TensorColumnError):
            staging.withdraw()
            raise
    finally:
        for spool in spools.values():
            spool.close()
        staging.close()


def _fill_part(
    store: FeatureStore, index: int, spool: TensorSpool, compute: Callable[[View], np.ndarray]
) -> None:
    part = store.snapshot.parts[index]
    for start in range(part.first_row, part.first_row + part.rows, _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, part.first_row + part.rows)
        view = View(store, np.arange(start, stop))
        spool.append(spool.check(compute(view), f"rows {start} to {stop - 1}", rows=stop - start))


def _fill_by_key(
    store: FeatureStore, spools: dict[int, TensorSpool], values: Iterable[tuple[str, np.ndarray]]
) -> None:
    missing = {i: np.ones(store.snapshot.parts[i].rows, bool) for i in spools}
    for key, value in values:
        parts, rows = store.locate(np.array([store.row(key)]))
        part, row = int(parts[0]), int(rows[0])
        if part not in spools:
            raise DuplicateKeyError(f"key {key!r}: the row already has this tensor; leave it out")
        if not missing[part][row]:
            raise DuplicateKeyError(f"key {key!r}: a value was given twice; give one value per row")
        spools[part].write_at(row, spools[part].check(value, f"key {key!r}"))
        missing[part][row] = False
    left = {i: np.flatnonzero(rows) for i, rows in missing.items() if rows.any()}
    if left:
        part, rows = next(iter(left.items()))
        key = store.key(store.snapshot.parts[part].first_row + int(rows[0]))
        raise TensorColumnError(
            f"{store.path}: {sum(map(len, left.values()))} rows got no value, the first is key {key!r}; "
            "give a value for every row"
        )


def _seal(staging: Staging, part: Part, spool: TensorSpool) -> TensorFile:
    return seal_tensor(staging, spool, f"{part.id}-{staging.id}")


def _with_column(
    newest: Snapshot, name: str, spec: TensorSpec, files: dict[str, TensorFile], message: str
) -> Snapshot:
    known = newest.tensors.get(name, spec)
    if known != spec:
        raise TensorColumnError(
            f"another writer published tensor {name!r} as {known.dtype}{known.shape} meanwhile; "
            "nothing was committed"
        )
    taken = [part.id for part in newest.parts if part.id in files and name in part.tensors]
    gone = files.keys() - {part.id for part in newest.parts}
    if taken or gone:
        raise CommitConflictError(
            f"another writer {'wrote' if taken else 'removed the rows of'} tensor {name!r} for part "
            f"{(taken or sorted(gone))[0]} meanwhile; nothing was committed"
        )
    parts = tuple(
        replace(part, tensors={**part.tensors, name: files[part.id]}) if part.id in files else part
        for part in newest.parts
    )
    return replace(newest, message=message, tensors={**newest.tensors, name: spec}, parts=parts)


def newest_store(store: FeatureStore) -> FeatureStore:
    """`store` itself when it is on the newest snapshot, else the newest."""
    return store if newest_snapshot(store.path).id == store.snapshot.id else store.refresh()
