"""A tensor column of a store: views without a copy, gathers with one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from storage.errors import RowNotFoundError, TensorColumnError
from storage.manifest import TensorSpec

if TYPE_CHECKING:
    from storage.store import FeatureStore

__all__ = ["TensorColumn"]

_LARGE_ROW_BYTES = 2048


class TensorColumn:
    """Rows of one fixed-shape tensor column.

    dtype: numpy dtype.  shape: of one row.
    """

    def __init__(self, store: FeatureStore, name: str, spec: TensorSpec) -> None:
        self.name = name
        self.dtype = np.dtype(spec.dtype)
        self.shape = spec.shape
        self._store = store
        self._spec = spec

    def __repr__(self) -> str:
        return f"TensorColumn({self.name!r}, {self.dtype}{self.shape})"

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Consecutive rows (stop - start, *shape) as a view of the file: nothing is copied.

        The view is a private map. Writing to it changes neither the file nor what anyone else reads.

        Raises:
            TensorColumnError: If the rows lie in more than one shard, or have no such tensor; use gather.
        """
        if (
            not isinstance(rows, slice)
            or rows.step not in (None, 1)
            or rows.start is None
            or rows.stop is None
        ):
            raise TensorColumnError(
                f"tensor {self.name!r}: a view is column[start:stop]; for other rows use gather"
            )
        if not 0 <= rows.start <= rows.stop:
            raise RowNotFoundError(
                f"tensor {self.name!r}: rows {rows.start}:{rows.stop} do not count upwards from 0"
            )
        if rows.start == rows.stop:
            return np.empty((0, *self.shape), self.dtype)
        parts, local = self._store.row_map.locate(np.arange(rows.start, rows.stop))
        if parts[0] != parts[-1] or local[-1] - local[0] != len(local) - 1:
            raise TensorColumnError(
                f"tensor {self.name!r}: rows {rows.start} to {rows.stop - 1} lie in more than one "
                "shard; use gather"
            )
        shard = self._store.part(int(parts[0])).tensor(self.name, self._spec)
        start, stop = int(local[0]), int(local[-1]) + 1
        shard.check(slice(start, stop), self._store.policy)
        self._store.counters.bytes_read += (stop - start) * self._spec.row_bytes
        return shard.private(start, stop)

    def gather(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Rows in any order, each copied once from the map into the result.

        Args:
            rows: Integer (n,), global row numbers; may repeat.
            out: Array (n, *shape) of the column's dtype, C-contiguous, to be filled and returned.

        Raises:
            RowNotFoundError: If a row does not exist.
            TensorColumnError: If `out` does not fit, or a row has no such tensor.
        """
        rows = np.asarray(rows)
        out = self._output(len(rows), out)
        parts, local = self._store.row_map.locate(rows)
        for part in np.unique(parts).tolist():
            shard = self._store.part(part).tensor(self.name, self._spec)
            mine = (
                slice(None)
                if parts[0] == parts[-1] == part and (parts == part).all()
                else np.flatnonzero(parts == part)
            )
            wanted = local[mine]
            shard.check(wanted, self._store.policy)
            _copy_rows(shard.array, wanted, out, mine)
        num_bytes = len(rows) * self._spec.row_bytes
        self._store.counters.bytes_read += num_bytes
        self._store.counters.bytes_copied += num_bytes
        return out

    def _output(self, count: int, out: np.ndarray | None) -> np.ndarray:
        if out is None:
            return np.empty((count, *self.shape), self.dtype)
        if out.dtype != self.dtype or out.shape != (count, *self.shape) or not out.flags.c_contiguous:
            raise TensorColumnError(
                f"tensor {self.name!r}: out is {out.dtype}{out.shape}, wanted C-contiguous "
                f"{self.dtype}{(count, *self.shape)}"
            )
        return out


def _copy_rows(source: np.ndarray, rows: np.ndarray, out: np.ndarray, positions: np.ndarray | slice) -> None:
    if isinstance(positions, slice):
        # Rows were checked, and only with mode="clip" does numpy write to `out` without a buffer between.
        np.take(source, rows, axis=0, out=out, mode="clip")
    elif source[0].nbytes >= _LARGE_ROW_BYTES:
        for position, row in zip(positions.tolist(), rows.tolist()):
            out[position] = source[row]
    else:
        out[positions] = source[rows]
