"""Row numbers: which part holds a row, which rows were deleted, and the files that list row numbers."""

from __future__ import annotations

import bisect
from pathlib import Path

import numpy as np
import pyarrow as pa

from storage.arrow_numpy import from_numpy
from storage.errors import RowNotFoundError
from storage.manifest import Snapshot
from storage.shards import ReaderPool

__all__ = ["RowMap", "write_row_file"]

_SCHEMA = pa.schema([pa.field("row", pa.int64(), nullable=False)])


def write_row_file(path: Path, rows: np.ndarray) -> None:
    """Write ascending row numbers, int64 (n,), as an Arrow file of one column."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
        writer.write_batch(pa.record_batch([from_numpy(rows)], schema=_SCHEMA))


class RowMap:
    """Global row number <-> part and row within the part, for one snapshot."""

    def __init__(self, snapshot: Snapshot, pool: ReaderPool) -> None:
        self._place = f"{pool.backend.url}: snapshot {snapshot.id}"
        self._pool = pool
        self._parts = snapshot.parts
        self._next_row = snapshot.next_row
        self._starts = [part.first_row for part in snapshot.parts]
        self._first_rows = np.array(self._starts, np.int64)
        self._ends = [part.end_row for part in snapshot.parts]
        self._end_rows = np.array(self._ends, np.int64)
        self._sparse = [i for i, part in enumerate(snapshot.parts) if part.row_ids is not None]
        self.deleted = pool.deleted_rows(snapshot)
        self._is_dense = not self._sparse and not len(self.deleted)

    def part_rows(self, part: int) -> np.ndarray:
        """The numbers of all rows of a part, deleted ones too, int64 (rows,) ascending."""
        held = self._parts[part]
        if held.row_ids is None:
            return np.arange(held.first_row, held.end_row)
        return self._pool.get(held).global_rows(np.arange(held.rows))

    def live_rows(self) -> np.ndarray:
        """The numbers of all rows that can be read, ascending."""
        if len(self._parts) == 1:
            rows = self.part_rows(0)
        else:
            rows = np.empty(sum(part.rows for part in self._parts), np.int64)
            start = 0
            for number, part in enumerate(self._parts):
                rows[start : start + part.rows] = self.part_rows(number)
                start += part.rows
        return rows[~self.is_deleted(rows)] if len(self.deleted) else rows

    def is_deleted(self, rows: np.ndarray) -> np.ndarray:
        """Bool (n,)."""
        if not len(self.deleted):
            return np.zeros(len(rows), bool)
        at = np.minimum(self.deleted.searchsorted(rows), len(self.deleted) - 1)
        is_deleted: np.ndarray = self.deleted[at] == rows
        return is_deleted

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Position in `snapshot.parts` and row within the part, int64 (n,) each.

        Raises:
            RowNotFoundError: If a row does not exist or was deleted.
        """
        if not np.issubdtype(rows.dtype, np.integer) or rows.ndim != 1:
            raise RowNotFoundError(f"rows are {rows.dtype}{rows.shape}, wanted whole numbers of shape (n,)")
        if not len(rows):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        parts = self._first_rows.searchsorted(rows, side="right") - 1
        if not len(self._parts) or (outside := (parts < 0) | (rows >= self._end_rows[parts])).any():
            raise self._not_found(int(rows[outside.argmax()]) if len(self._parts) else int(rows[0]))
        local = rows - self._first_rows[parts]
        for part in self._sparse:
            mine = np.flatnonzero(parts == part)
            if len(mine):
                local[mine] = self._sparse_local(part, rows[mine])
        if len(self.deleted) and (gone := self.is_deleted(rows)).any():
            raise self._not_found(int(rows[gone.argmax()]))
        return parts, local

    def locate_one(self, row: int) -> tuple[int, int]:
        """Like `locate` for one row."""
        part = bisect.bisect_right(self._starts, row) - 1
        if part < 0 or row >= self._ends[part]:
            raise self._not_found(row)
        if self._is_dense:
            return part, row - self._starts[part]
        parts, local = self.locate(np.array([row]))
        return int(parts[0]), int(local[0])

    def _sparse_local(self, part: int, rows: np.ndarray) -> np.ndarray:
        ids = self.part_rows(part)
        local = np.minimum(ids.searchsorted(rows), len(ids) - 1)
        missing = ids[local] != rows
        if missing.any():
            raise self._not_found(int(rows[missing.argmax()]))
        return local

    def _not_found(self, row: int) -> RowNotFoundError:
        deleted = 0 <= row < self._next_row
        reason = "it was deleted or never published" if deleted else f"rows are below {self._next_row}"
        return RowNotFoundError(f"{self._place} has no row {row}; {reason}")
