"""The Parquet file of a part: whole columns, or the row groups in which some rows lie."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.arrow_numpy import from_numpy
from storage.column_cache import ColumnCache
from storage.errors import CorruptionError

__all__ = ["IndexFile"]

_cache = ColumnCache(256 << 20)
_SMALL_BYTES = 4 << 20


class IndexFile:
    """Columns that were read are kept up to a bound that all files of the process share.

    path: of a file of this machine.  place: what errors say.  rows: how many the snapshot says.
    identity: by which what was read is found again.
    """

    def __init__(self, path: Path, place: str, rows: int, identity: str) -> None:
        self._path = path
        self._place = place
        self._rows = rows
        self._identity = identity
        self._metadata: pq.FileMetaData | None = None
        self._ends = np.empty(0, np.int64)

    def column(self, name: str, kind: pa.DataType) -> pa.Array:
        """One metadata column as (rows,); nulls when the file does not have it."""
        return _cache.get(self._identity, f"{name} {kind}", lambda: self._read(name, kind, None))

    def take(self, name: str, kind: pa.DataType, rows: np.ndarray) -> pa.Array:
        """Some rows of a column in their order; of a file with several row groups only those that are needed.

        Args:
            rows: int64 (n,), rows of the file.
        """
        groups = self._groups(rows)
        if not len(groups) or 2 * len(groups) > len(self._ends):
            return self.column(name, kind).take(from_numpy(rows))
        pieces = [
            _cache.get(
                self._identity, f"{name} {kind} {group}", functools.partial(self._read, name, kind, [group])
            )
            for group in groups.tolist()
        ]
        starts = np.concatenate([[0], self._ends])[groups]
        kept = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
        at = np.searchsorted(starts, rows, side="right") - 1
        local = rows - starts[at] + kept[at]
        return (pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)).take(from_numpy(local))

    def _groups(self, rows: np.ndarray) -> np.ndarray:
        """The row groups of rows, ascending."""
        if self._metadata is None:
            with self._open() as file:
                self._check_rows(file.metadata.num_rows)
                sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
                self._ends = np.cumsum(np.array(sizes, np.int64))
                self._metadata = file.metadata
        return np.flatnonzero(np.bincount(self._ends.searchsorted(rows, side="right")))

    def _read(self, name: str, kind: pa.DataType, groups: list[int] | None) -> pa.Array:
        with self._open() as file:
            # Before anything is read: a small file may claim any number of rows.
            self._check_rows(file.metadata.num_rows)
            places = [at + 1 for at, held in enumerate(file.schema_arrow.names) if held == name]
            if len(places) > 1:
                raise CorruptionError(
                    f"{self._place}: columns {places[0]} and {places[1]} are both named {name!r}; copy the "
                    "file back from a backup"
                )
            if not places:
                return pa.nulls(self._rows if groups is None else self._size(groups), kind)
            try:
                table = (
                    file.read([name], use_threads=False)
                    if groups is None
                    else file.read_row_groups(groups, [name], use_threads=False)
                )
                array = _apart(_joined(table.column(0), kind))
            except (pa.ArrowException, OSError) as error:
                raise CorruptionError(
                    f"{self._place}: column {name!r} cannot be read: {error}; copy it back from a backup"
                ) from error
        return array

    def _size(self, groups: list[int]) -> int:
        starts = np.concatenate([[0], self._ends])
        return int((self._ends[groups] - starts[groups]).sum())

    def _open(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self._path, metadata=self._metadata)
        except (pa.ArrowException, OSError) as error:
            raise CorruptionError(
                f"{self._place}: the file is no Parquet file: {error}; copy it back from a backup"
            ) from error

    def _check_rows(self, found: int) -> None:
        if found != self._rows:
            raise CorruptionError(
                f"{self._place}: {found} rows, the snapshot says {self._rows}; copy it back from a backup"
            )


def _joined(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """One array of a type. Casting imports the functions of pyarrow, which is for what others wrote."""
    return (column if column.type == kind else column.cast(kind)).combine_chunks()


def _apart(array: pa.Array) -> pa.Array:
    """A small array outside Arrow's pool: there it would hold all of the huge pages that it was read in."""
    if array.nbytes > _SMALL_BYTES:
        return array
    buffers = [None if buffer is None else pa.py_buffer(buffer.to_pybytes()) for buffer in array.buffers()]
    return pa.Array.from_buffers(array.type, len(array), buffers, array.null_count, array.offset)
