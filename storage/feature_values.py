"""Where the values of an added tensor column come from: a function of views, or pairs of key and array."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from storage.errors import DuplicateKeyError, TensorColumnError
from storage.tensors import row_bytes
from storage.value_log import ValueLog
from storage.view import View

if TYPE_CHECKING:
    from storage.features import ColumnRequest
    from storage.store import FeatureStore

__all__ = ["Compute", "Values", "collect_values", "compute_values"]

Compute = Callable[[View], np.ndarray | tuple[np.ndarray, np.ndarray]]
Values = Iterable[tuple[str, np.ndarray]] | Compute

_CHUNK_ROWS = 1024
_CHUNK_BYTES = 64 << 20


def compute_values(
    store: FeatureStore, rows: np.ndarray, log: ValueLog, compute: Compute, request: ColumnRequest
) -> None:
    """Log what `compute` gives for those of `rows` that the log lacks; chunks do not depend on the log."""
    step = _chunk_rows(request)
    logged, _ = log.sorted_rows()
    is_left = ~np.isin(rows, logged, assume_unique=True)
    chunks = (slice(start, start + step) for start in range(0, len(rows), step))
    views = (View(store, rows[chunk][is_left[chunk]]) for chunk in chunks if is_left[chunk].any())
    done = len(rows) - int(is_left.sum())
    for view, result in _in_order(compute, views, request.workers):
        place = f"rows {view.rows[0]} to {view.rows[-1]}"
        has, values = _split_result(result, len(view), place, request)
        data = row_bytes(request.name, request.spec, values, place, rows=int(has.sum()))
        log.append(view.rows, has, data)
        done += len(view)
        if request.progress is not None:
            request.progress(done, len(rows))


def _chunk_rows(request: ColumnRequest) -> int:
    return max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // request.spec.row_bytes))


def _split_result(
    result: np.ndarray | tuple[np.ndarray, np.ndarray], count: int, place: str, request: ColumnRequest
) -> tuple[np.ndarray, np.ndarray]:
    """Which rows have a value, bool (n,), and the values."""
    if not isinstance(result, tuple):
        return np.ones(count, bool), result
    if not request.sparse:
        raise TensorColumnError(
            f"{place}: tensor {request.name!r}: the function left rows out; allow it with sparse=True"
        )
    has, values = result
    if not isinstance(has, np.ndarray) or has.dtype != bool or has.shape != (count,):
        raise TensorColumnError(
            f"{place}: tensor {request.name!r}: the function must give (has, values) with has bool({count},)"
        )
    return has, values


def _in_order(
    compute: Compute, views: Iterator[View], workers: int | Executor
) -> Iterator[tuple[View, np.ndarray | tuple[np.ndarray, np.ndarray]]]:
    """Results in the order of the views, of which only a few are under way."""
    if isinstance(workers, int) and workers <= 1:
        for view in views:
            yield view, compute(view)
        return
    with contextlib.ExitStack() as stack:
        if isinstance(workers, int):
            pool: Executor = stack.enter_context(ThreadPoolExecutor(workers))
            num_ahead = 2 * workers
        else:
            pool, num_ahead = workers, 2 * (os.cpu_count() or 1)
        pending: deque[tuple[View, Future[np.ndarray | tuple[np.ndarray, np.ndarray]]]] = deque()
        try:
            for view in views:
                pending.append((view, pool.submit(compute, view)))
                if len(pending) >= num_ahead:
                    first, future = pending.popleft()
                    yield first, future.result()
            while pending:
                first, future = pending.popleft()
                yield first, future.result()
        finally:
            for _, future in pending:
                future.cancel()


def collect_values(
    store: FeatureStore,
    rows: np.ndarray,
    log: ValueLog,
    values: Iterable[tuple[str, np.ndarray]],
    request: ColumnRequest,
) -> None:
    """Log pairs of key and array, which may come in any order."""
    missing = np.ones(len(rows), bool)
    step = _chunk_rows(request)
    positions: list[int] = []
    data = bytearray()
    for pair in values:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TensorColumnError(
                f"tensor {request.name!r}: {type(pair).__name__} where a pair of key and array was expected; "
                "give pairs, or a function from a View to an array"
            )
        key, value = pair
        row = store.row(key)
        at = int(rows.searchsorted(row))
        if at == len(rows) or rows[at] != row:
            raise DuplicateKeyError(f"key {key!r}: the row already has this tensor; leave it out")
        if not missing[at]:
            raise DuplicateKeyError(f"key {key!r}: a value was given twice; give one value per row")
        data += row_bytes(request.name, request.spec, value, f"key {key!r}", rows=None)
        missing[at] = False
        positions.append(at)
        if len(positions) == step:
            log.append(rows[positions], np.ones(step, bool), memoryview(data))
            positions, data = [], bytearray()
            if request.progress is not None:
                request.progress(len(log), len(rows))
    if positions:
        log.append(rows[positions], np.ones(len(positions), bool), memoryview(data))
    left = np.flatnonzero(missing)
    if len(left) and not request.sparse:
        raise TensorColumnError(
            f"{store.url}: {len(left)} rows got no value, the first is key "
            f"{store.key(int(rows[left[0]]))!r}; give a value for every row, or allow gaps with sparse=True"
        )
