"""Tensor columns that are computed after the rows were written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from storage.errors import CommitConflictError, DuplicateKeyError, TensorColumnError
from storage.manifest import Part, Snapshot, TensorFile, TensorSpec
from storage.part_builder import seal_tensor
from storage.snapshots import newest_snapshot, publish
from storage.staging import Staging
from storage.tensors import TensorSpool
from storage.view import View

if TYPE_CHECKING:
    from storage.store import FeatureStore

__all__ = ["Values", "add_tensor_column"]

Values = Iterable[tuple[str, np.ndarray]] | Callable[[View], np.ndarray]

_CHUNK_ROWS = 1024


def add_tensor_column(
    store: FeatureStore, name: str, values: Values, spec: TensorSpec, message: str
) -> Snapshot:
    """Write the column for every part of `store` (its newest snapshot) that lacks it, and publish it."""
    positions = [i for i, part in enumerate(store.snapshot.parts) if name not in part.tensors]
    if not positions:
        raise TensorColumnError(f"{store.url}: every row has a tensor {name!r} already; use another name")
    known = store.snapshot.tensors.get(name, spec)
    if known != spec:
        raise TensorColumnError(
            f"tensor column {name!r} is {known.dtype}{known.shape}, not {spec.dtype}{spec.shape}"
        )
    rows = np.concatenate([store.row_map.part_rows(i) for i in positions])
    staging = Staging(store.backend)
    spool = TensorSpool(name, spec, staging.path / f"{name}.spool")
    try:
        spool.reserve(len(rows))
        if callable(values):
            _fill_by_function(store, rows, spool, values)
        else:
            _fill_by_key(store, rows, spool, values)
        files = _seal_parts(staging, spool, [store.snapshot.parts[i] for i in positions])
        staging.flush()
        try:
            return publish(store.backend, lambda newest: _with_column(newest, name, spec, files, message))
        except (CommitConflictError, TensorColumnError):
            staging.withdraw()
            raise
    finally:
        spool.close()
        staging.close()


def _seal_parts(staging: Staging, spool: TensorSpool, parts: list[Part]) -> dict[str, TensorFile]:
    files = {}
    start = 0
    for part in parts:
        files[part.id] = seal_tensor(staging, spool, f"{part.id}-{staging.id}", start, start + part.rows)
        start += part.rows
    return files


def _fill_by_function(
    store: FeatureStore, rows: np.ndarray, spool: TensorSpool, compute: Callable[[View], np.ndarray]
) -> None:
    """Compute the live ones of `rows`, the numbers of the rows of the spool; deleted rows stay zero."""
    live = np.flatnonzero(~store.row_map.is_deleted(rows))
    for begin in range(0, len(live), _CHUNK_ROWS):
        chunk = live[begin : begin + _CHUNK_ROWS]
        view = View(store, rows[chunk])
        place = f"rows {view.rows[0]} to {view.rows[-1]}"
        data = spool.check(compute(view), place, rows=len(view))
        done = 0
        for run in np.split(chunk, np.flatnonzero(np.diff(chunk) != 1) + 1):
            size = len(run) * spool.spec.row_bytes
            spool.write_at(int(run[0]), data[done : done + size])
            done += size


def _fill_by_key(
    store: FeatureStore, rows: np.ndarray, spool: TensorSpool, values: Iterable[tuple[str, np.ndarray]]
) -> None:
    missing = ~store.row_map.is_deleted(rows)
    for key, value in values:
        row = store.row(key)
        at = int(rows.searchsorted(row))
        if at == len(rows) or rows[at] != row:
            raise DuplicateKeyError(f"key {key!r}: the row already has this tensor; leave it out")
        if not missing[at]:
            raise DuplicateKeyError(f"key {key!r}: a value was given twice; give one value per row")
        spool.write_at(at, spool.check(value, f"key {key!r}"))
        missing[at] = False
    left = np.flatnonzero(missing)
    if len(left):
        raise TensorColumnError(
            f"{store.url}: {len(left)} rows got no value, the first is key "
            f"{store.key(int(rows[left[0]]))!r}; give a value for every row"
        )


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
    return store if newest_snapshot(store.backend).id == store.snapshot.id else store.refresh()
