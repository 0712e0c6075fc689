"""Numbers between Arrow and numpy without a copy. The converters of pyarrow import pandas, these do not."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

__all__ = ["from_numpy", "to_numpy"]


def to_numpy(array: pa.Array | pa.ChunkedArray, dtype: np.typing.DTypeLike) -> np.ndarray:
    """A view of an array of fixed-width numbers without nulls; chunks are joined."""
    if isinstance(array, pa.ChunkedArray):
        chunks = [to_numpy(chunk, dtype) for chunk in array.chunks]
        return chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, dtype), *chunks])
    kind = np.dtype(dtype)
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.empty(0, kind)
    return np.frombuffer(data, kind, len(array), array.offset * kind.itemsize)


def from_numpy(values: np.ndarray) -> pa.Array:
    """An int64 or uint64 array on the memory of `values`."""
    values = np.ascontiguousarray(values)
    kind = pa.uint64() if values.dtype == np.uint64 else pa.int64()
    data = values if values.dtype == np.uint64 else values.astype(np.int64, copy=False)
    return pa.Array.from_buffers(kind, len(data), [None, pa.py_buffer(data)])
