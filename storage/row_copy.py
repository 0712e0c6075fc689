"""Copying rows of a map into a batch. A large batch is copied by several threads: one core does not fill the
memory's bandwidth, and numpy lets go of the interpreter while it copies."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise

import numpy as np

__all__ = ["copy_rows"]

_LARGE_ROW_BYTES = 2048
_PIECE_BYTES = 4 << 20
_MAX_THREADS = 4


def copy_rows(source: np.ndarray, rows: np.ndarray, out: np.ndarray, positions: np.ndarray | slice) -> None:
    """Set `out[positions]` to `source[rows]`.

    Args:
        source: C-contiguous (rows of the shard, *shape).
        rows: Integer (n,), all of them in range.
        out: C-contiguous (batch, *shape) of the same dtype.
        positions: Integer (n,), or slice(None) when n is the batch.
    """
    row_bytes = source.strides[0]
    num_pieces = min(_num_threads(), len(rows) * row_bytes // _PIECE_BYTES)
    if num_pieces < 2:
        _copy_piece(source, rows, out, positions, row_bytes)
        return
    bounds = [len(rows) * i // num_pieces for i in range(num_pieces + 1)]
    pieces = [slice(start, end) for start, end in pairwise(bounds)]

    def copy(piece: slice) -> None:
        if isinstance(positions, slice):
            _copy_piece(source, rows[piece], out[piece], positions, row_bytes)
        else:
            _copy_piece(source, rows[piece], out, positions[piece], row_bytes)

    others = [_threads(os.getpid()).submit(copy, piece) for piece in pieces[1:]]
    try:
        copy(pieces[0])
    finally:
        # Nobody may write to `out` any more once the caller has it back.
        wait(others)
    for other in others:
        other.result()


def _copy_piece(
    source: np.ndarray, rows: np.ndarray, out: np.ndarray, positions: np.ndarray | slice, row_bytes: int
) -> None:
    if isinstance(positions, slice):
        # Rows were checked, and only with mode="clip" does numpy write to `out` without a buffer between.
        np.take(source, rows, axis=0, out=out, mode="clip")
    elif row_bytes >= _LARGE_ROW_BYTES:
        for position, row in zip(positions.tolist(), rows.tolist()):
            out[position] = source[row]
    else:
        out[positions] = source[rows]


def _num_threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


@cache
def _threads(pid: int) -> ThreadPoolExecutor:
    """Threads of one process: a forked child has none of its parent's."""
    return ThreadPoolExecutor(_MAX_THREADS - 1, thread_name_prefix="copy-rows")
