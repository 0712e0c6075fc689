"""Values between Arrow and numpy. The converters of pyarrow import pandas where it is there, which takes half
a second; these do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["from_list", "from_numpy", "pick_list", "to_numpy"]


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


def pick_list(array: pa.Array, at: np.ndarray) -> list[Any]:
    """The values at some places, int64 (n,), as Python values; None where there is none.

    For large_string, int64, uint64, float64 and bool. Unlike `take` it does not import the functions of
    pyarrow, and does not let go of the interpreter, which for few values costs more than they do.
    """
    if array.null_count == len(array):
        return [None] * len(at)
    nulls, *buffers = array.buffers()
    places = at + array.offset
    found: list[Any]
    if pa.types.is_large_string(array.type):
        ends, text = np.frombuffer(buffers[0], np.int64), memoryview(buffers[1] or b"")
        bounds = zip(ends[places].tolist(), ends[places + 1].tolist())
        # A loop over few texts costs less than the many calls that take them out at once.
        found = [text[start:end].tobytes().decode() for start, end in bounds]
    elif pa.types.is_boolean(array.type):
        found = _bits(buffers[0], places).tolist()
    else:
        kind = np.dtype({"double": "float64"}.get(str(array.type), str(array.type)))
        found = np.frombuffer(buffers[0], kind)[places].tolist()
    if nulls is None:
        return found
    return [value if is_there else None for value, is_there in zip(found, _bits(nulls, places).tolist())]


def _bits(buffer: pa.Buffer, places: np.ndarray) -> np.ndarray:
    """Bool (n,), the bits at some places."""
    taken: np.ndarray = np.frombuffer(buffer, np.uint8)[places >> 3] >> (places & 7) & 1 == 1
    return taken
