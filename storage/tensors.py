"""Tensor shards: fixed-shape rows in uncompressed Arrow IPC files, one record batch each, 64-byte aligned."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from storage.errors import TensorColumnError
from storage.manifest import FILE_NAME, TensorSpec
from storage.manifest_fields import MAX_AXES, MAX_BYTES

__all__ = [
    "BLOCK_BYTES",
    "TensorSpool",
    "block_checksums",
    "block_rows",
    "read_block_checksums",
    "row_bytes",
    "tensor_spec",
]

BLOCK_BYTES = 256 << 10
_ALIGNMENT = 64


def tensor_spec(name: str, dtype: np.typing.DTypeLike, shape: tuple[int, ...]) -> TensorSpec:
    """Check a name, a dtype and the shape of one row.

    Raises:
        TensorColumnError: If the name cannot be that of a folder, the dtype is not bool, integer or float of
            up to 8 bytes, an axis is empty, or there are more axes or values than a snapshot can say.
    """
    if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
        raise TensorColumnError(
            f"tensor column {name!r} cannot be used: a name has 1 to 128 letters, digits, '_', '-' and '.', "
            "and does not begin with '-' or '.'"
        )
    try:
        kind = np.dtype(dtype)
    except TypeError:
        raise TensorColumnError(
            f"tensor column {name!r}: {dtype!r} is no numpy dtype; convert the value to a numpy array first"
        ) from None
    if kind.kind not in "biuf" or kind.itemsize > 8 or not kind.isnative:
        raise TensorColumnError(
            f"tensor column {name!r}: dtype {kind} cannot be stored; use bool, an integer or a float "
            "of up to 64 bits"
        )
    sizes = tuple(int(size) for size in shape)
    if any(size < 1 for size in sizes):
        raise TensorColumnError(f"tensor column {name!r}: shape {sizes} has an empty axis")
    spec = TensorSpec(dtype=kind.name, shape=sizes)
    if len(sizes) > MAX_AXES or spec.row_bytes >= MAX_BYTES:
        raise TensorColumnError(
            f"tensor column {name!r}: {len(sizes)} axes and {spec.row_bytes} bytes a row cannot be stored; "
            f"use at most {MAX_AXES} axes and fewer than 2^60 bytes"
        )
    return spec


def block_rows(spec: TensorSpec) -> int:
    """Rows under one checksum: as many as fit 256 KiB, at least one."""
    return max(1, BLOCK_BYTES // spec.row_bytes)


def block_checksums(rows: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """uint64 (blocks,): xxh3_64 of each block of raw row bytes (uint8)."""
    step = block_rows(spec) * spec.row_bytes
    return np.array(
        [xxhash.xxh3_64_intdigest(rows[start : start + step].data) for start in range(0, len(rows), step)],
        np.uint64,
    )


class TensorSpool:
    """Collects the raw rows of one tensor column in a file, then seals them as Arrow.

    rows: rows of the part that were seen, with a value or without.
    """

    def __init__(self, name: str, spec: TensorSpec, spool: Path) -> None:
        self.name = name
        self.spec = spec
        self.rows = 0
        self._runs: list[tuple[int, int]] = []
        self._spool = spool
        self._file = spool.open("xb", buffering=1 << 20)

    def check(self, value: object, place: str, *, rows: int | None = None) -> memoryview:
        """The bytes of one row, or of `rows` stacked rows; `place` names them in errors.

        Raises:
            TensorColumnError: If dtype or shape differ from the column's.
        """
        return row_bytes(self.name, self.spec, value, place, rows=rows)

    def append(self, data: memoryview) -> None:
        """Add checked bytes as the next rows."""
        count = len(data) // self.spec.row_bytes
        self._file.write(data)
        follows = self._runs and self._runs[-1][1] == self.rows
        start = self._runs.pop()[0] if follows else self.rows
        self.rows += count
        self._runs.append((start, self.rows))

    def skip(self, rows: int) -> None:
        """Leave so many next rows without a value."""
        self.rows += rows

    def present(self) -> np.ndarray:
        """The rows that have a value, int64 (n,) ascending."""
        return np.concatenate([np.empty(0, np.int64), *(np.arange(*run) for run in self._runs)])

    def seal(self, path: Path) -> tuple[int, str]:
        """Write the rows that have a value as an Arrow file.

        Returns:
            The byte at which the rows begin, and the xxh3_128 of their block checksums.
        """
        self._file.flush()
        with pa.memory_map(str(self._spool)) as source:
            raw = source.read_buffer()
        checksums = block_checksums(np.frombuffer(raw, np.uint8), self.spec).astype(">u8").tobytes()
        footer = {"block_rows": str(block_rows(self.spec)), "block_xxh3_64": checksums.hex()}
        rows = raw.size // self.spec.row_bytes
        with pa.OSFile(str(path), "wb") as sink:
            _write_arrow(sink, self.name, self.spec, raw, rows, footer, _padding(self.name, self.spec))
        return _row_offset(self.name, self.spec), xxhash.xxh3_128_hexdigest(checksums)

    def close(self) -> None:
        """Drop the spooled rows."""
        with contextlib.suppress(OSError):
            self._file.close()  # What was not written yet is not wanted; the disk may be full.
        self._spool.unlink(missing_ok=True)


def row_bytes(name: str, spec: TensorSpec, value: object, place: str, *, rows: int | None) -> memoryview:
    """The bytes of one row of a column, or of `rows` stacked rows; `place` names them in errors.

    Raises:
        TensorColumnError: If dtype or shape differ from the column's.
    """
    shape = spec.shape if rows is None else (rows, *spec.shape)
    if isinstance(value, np.ma.MaskedArray):
        raise TensorColumnError(
            f"{place}: tensor {name!r} is a masked array; fill it first, no mask is stored"
        )
    if not isinstance(value, np.ndarray) or value.dtype != np.dtype(spec.dtype) or value.shape != shape:
        found = f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
        raise TensorColumnError(
            f"{place}: tensor {name!r} is {found}, the column holds {spec.dtype}{shape}; "
            "convert it first, nothing is cast silently"
        )
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def _value_type(spec: TensorSpec) -> pa.DataType:
    """Arrow packs bool into bits, so bool rows are stored as the bytes 0 and 1."""
    return pa.uint8() if spec.dtype == "bool" else pa.from_numpy_dtype(np.dtype(spec.dtype))


def _write_arrow(
    sink: pa.NativeFile,
    name: str,
    spec: TensorSpec,
    raw: pa.Buffer,
    rows: int,
    footer: dict[str, str],
    padding: int,
) -> None:
    values = pa.Array.from_buffers(_value_type(spec), raw.size // np.dtype(spec.dtype).itemsize, [None, raw])
    kind = pa.fixed_shape_tensor(_value_type(spec), spec.shape)
    storage = pa.FixedSizeListArray.from_arrays(values, len(values) // rows)
    field = pa.field(name, kind, nullable=False)
    schema = pa.schema([field], metadata={"dtype": spec.dtype, "padding": " " * padding})
    with pa.ipc.new_file(sink, schema, metadata=footer) as writer:
        writer.write_batch(pa.record_batch([pa.ExtensionArray.from_storage(kind, storage)], schema=schema))


@functools.lru_cache(maxsize=256)
def _padding(name: str, spec: TensorSpec) -> int:
    """Spaces in the schema's metadata that put the rows on a multiple of 64 bytes; Arrow aligns to 8."""
    for padding in range(1, 2 * _ALIGNMENT, 8):
        if _dummy_offset(name, spec, padding) % _ALIGNMENT == 0:
            return padding
    raise TensorColumnError(f"tensor column {name!r}: its rows cannot be aligned to {_ALIGNMENT} bytes")


@functools.lru_cache(maxsize=256)
def _row_offset(name: str, spec: TensorSpec) -> int:
    return _dummy_offset(name, spec, _padding(name, spec))


def _dummy_offset(name: str, spec: TensorSpec, padding: int) -> int:
    """Where the rows begin: the header does not depend on how many there are."""
    sink = pa.BufferOutputStream()
    _write_arrow(sink, name, spec, pa.py_buffer(bytes(spec.row_bytes)), 1, {}, padding)
    content = sink.getvalue()
    column = pa.ipc.open_file(content).get_batch(0).column(0)
    return int(column.storage.values.buffers()[1].address - content.address)


def read_block_checksums(mapped: np.ndarray) -> bytes:
    """8 bytes per block, most significant first, from the footer of a mapped Arrow file."""
    return bytes.fromhex(pa.ipc.open_file(pa.py_buffer(mapped)).metadata[b"block_xxh3_64"].decode())
