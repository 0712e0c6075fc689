"""Tensor columns that are computed after the rows were written."""

from __future__ import annotations

import itertools
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
    parts = [part for part in store.snapshot.parts if name not in part.tensors]
    if not parts:
        raise TensorColumnError(f"{store.path}: every row has a tensor {name!r} already; use another name")
    known = store.snapshot.tensors.get(name, spec)
    if known != spec:
        raise TensorColumnError(
            f"tensor column {name!r} is {known.dtype}{known.shape}, not {spec.dtype}{spec.shape}"
        )
    staging = Staging(store.path)
    spool = TensorSpool(name, spec, staging.path / f"{name}.spool")
    try:
        if callable(values):
            for part in parts:
                _fill_part(store, part, spool, values)
        else:
            _fill_by_key(store, parts, spool, values)
        files = {
            part.id: seal_tensor(staging, spool, f"{part.id}-{staging.id}", start, start + part.rows)
            for part, start in zip(parts, _starts(parts))
        }
        staging.flush()
        try:
            return publish(store.path, lambda newest: _with_column(newest, name, spec, files, message))
        except (CommitConflictError, TensorColumnError):
            staging.withdraw()
            raise
    finally:
        spool.close()
        staging.close()


def _starts(parts: list[Part]) -> list[int]:
    """Where each part begins in the spool, which holds the rows of the parts one after the other."""
    return list(itertools.accumulate((part.rows for part in parts[:-1]), initial=0))


def _fill_part(
    store: FeatureStore, part: Part, spool: TensorSpool, compute: Callable[[View], np.ndarray]
) -> None:
    end = part.first_row + part.rows
    for start in range(part.first_row, end, _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, end)
        values = compute(View(store, np.arange(start, stop)))
        spool.append(spool.check(values, f"rows {start} to {stop - 1}", rows=stop - start))


def _fill_by_key(
    store: FeatureStore, parts: list[Part], spool: TensorSpool, values: Iterable[tuple[str, np.ndarray]]
) -> None:
    offsets = {part.first_row: start - part.first_row for part, start in zip(parts, _starts(parts))}
    missing = np.ones(sum(part.rows for part in parts), bool)
    for key, value in values:
        row = store.row(key)
        offset = offsets.get(store.part_of(row).first_row)
        if offset is None:
            raise DuplicateKeyError(f"key {key!r}: the row already has this tensor; leave it out")
        if not missing[row + offset]:
            raise DuplicateKeyError(f"key {key!r}: a value was given twice; give one value per row")
        spool.write_at(row + offset, spool.check(value, f"key {key!r}"))
        missing[row + offset] = False
    left = np.flatnonzero(missing)
    if len(left):
        rows = np.concatenate([np.arange(part.first_row, part.first_row + part.rows) for part in parts])
        raise TensorColumnError(
            f"{store.path}: {len(left)} rows got no value, the first is key "
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
    return store if newest_snapshot(store.path).id == store.snapshot.id else store.refresh()
