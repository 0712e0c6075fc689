"""Values between Arrow and numpy. The converters of pyarrow import pandas where it is there, which takes half
a second; these do not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

__all__ = ["from_list", "from_numpy", "to_numpy"]


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


def from_list(values: Sequence[str | int | float | bool | None], kind: pa.DataType) -> pa.Array:
    """An array of large_string, int64, uint64, float64 or bool; None is null."""
    count = len(values)
    present = np.fromiter((value is not None for value in values), np.bool_, count)
    nulls = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
    if pa.types.is_large_string(kind):
        texts = [value.encode() if isinstance(value, str) else b"" for value in values]
        ends = np.zeros(count + 1, np.int64)
        np.cumsum(np.fromiter(map(len, texts), np.int64, count), out=ends[1:])
        return pa.Array.from_buffers(kind, count, [nulls, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))])
    dtype = np.dtype({"double": "float64"}.get(str(kind), str(kind)))
    data = np.fromiter((0 if value is None else value for value in values), dtype, count)
    if pa.types.is_boolean(kind):
        data = np.packbits(data, bitorder="little")
    return pa.Array.from_buffers(kind, count, [nulls, pa.py_buffer(data)])
