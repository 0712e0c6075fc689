"""Rows on their way from one format to another: a few at a time, bounded in number and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.arrow_numpy import to_numpy
from storage.blobs import Blob
from storage.errors import StorageError
from storage.view import View

__all__ = ["RowBatch", "TensorRows", "number_files", "read_batches"]

_MAX_ROWS = 1024
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRows:
    """One tensor column of n rows.

    values: (n, *shape); zeros in a row that has none.
    present: bool (n,).
    """

    values: np.ndarray
    present: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Neighbouring rows.

    keys: n.  blobs: n, None where a row has none.
    columns: the user's metadata columns, in n rows.
    tensors: of every tensor column of the store.
    """

    keys: Sequence[str]
    blobs: Sequence[Blob | None]
    columns: pa.Table
    tensors: Mapping[str, TensorRows]

    def rows(self) -> list[dict[str, Any]]:
        """The metadata of each row."""
        return self.columns.to_pylist() if self.columns.num_columns else [{} for _ in self.keys]

    @property
    def bytes(self) -> int:
        """Bytes of blobs, metadata and tensors."""
        blobs = sum(memoryview(blob).nbytes for blob in self.blobs if blob is not None)
        return int(blobs + self.columns.nbytes + sum(rows.values.nbytes for rows in self.tensors.values()))


def read_batches(view: View) -> Iterator[RowBatch]:
    """The rows of a view, in its order.

    Raises:
        StorageError: If a row is in the view twice: a key must be unique.
        CorruptionError: If a shard is damaged.
    """
    if len(np.unique(view.rows)) != len(view):
        raise StorageError(f"{view!r}: a row is in the view twice; give each row once")
    blob_bytes = to_numpy(pc.fill_null(view.column("bytes"), 0), np.int64)
    row_bytes = sum(spec.row_bytes for spec in view.store.snapshot.tensors.values())
    ends = np.cumsum(blob_bytes + row_bytes)
    start = 0
    while start < len(view):
        done = int(ends[start - 1]) if start else 0
        stop = int(ends.searchsorted(done + _MAX_BYTES, "right"))
        stop = min(max(stop, start + 1), start + _MAX_ROWS, len(view))
        yield _read_batch(view[start:stop])
        start = stop


def _read_batch(view: View) -> RowBatch:
    store = view.store
    has_blob = pc.is_valid(view.column("bytes")).to_pylist()
    return RowBatch(
        keys=view.column("key").to_pylist(),
        blobs=[store.blob(row) if has else None for row, has in zip(view.rows.tolist(), has_blob)],
        columns=view.to_arrow(list(store.snapshot.columns)),
        tensors={name: _read_tensor(view, name) for name in store.snapshot.tensors},
    )


def _read_tensor(view: View, name: str) -> TensorRows:
    column = view.store.tensor(name)
    present = column.has(view.rows)
    values = np.zeros((len(view), *column.shape), column.dtype)
    values[present] = column.gather(view.rows[present])
    return TensorRows(values=values, present=present)


def number_files(batches: Iterable[RowBatch], file_bytes: int) -> Iterator[tuple[int, RowBatch]]:
    """Each batch with the number of the file that it goes to, so that files have about `file_bytes`."""
    number = size = 0
    for batch in batches:
        if size and size + batch.bytes > file_bytes:
            number, size = number + 1, 0
        size += batch.bytes
        yield number, batch
