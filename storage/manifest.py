"""What a snapshot says: the parts, files and columns that a store held at one moment."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

__all__ = [
    "FILE_NAME",
    "ColumnSpec",
    "FileRef",
    "ModelRecord",
    "Part",
    "Snapshot",
    "TensorFile",
    "TensorSpec",
]

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRef:
    """One immutable file.

    path: relative to the store, with forward slashes.
    bytes: its size.
    xxh3: xxh3_128 of the whole file, 32 hexadecimal digits.
    rows: rows in it.
    """

    path: str
    bytes: int
    xxh3: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile(FileRef):
    """An Arrow file of one tensor column. Its `rows` are those of the part that have a value.

    offset: where row 0 begins, a multiple of 64.
    blocks_xxh3: xxh3_128 of the block checksums that the footer of the file holds.
    present: the rows of the part that have a value, ascending; None when all have one.
    """

    offset: int
    blocks_xxh3: str
    present: FileRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """What computed a tensor column. Example: ModelRecord(name="siglip-b16", hash="9f2c...").

    hash: of the weights and settings, as the caller gave it; None when it gave none.
    """

    name: str
    hash: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor column: numpy dtype name, the shape of one row, and the model that computed it.

    Specifications are equal when rows of one fit the other: the model is not compared.
    """

    dtype: str
    shape: tuple[int, ...]
    model: ModelRecord | None = field(default=None, compare=False)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return _row_bytes(self.dtype, self.shape)


@functools.lru_cache(maxsize=256)
def _row_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return np.dtype(dtype).itemsize * math.prod(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """A column of the index: its type (string, int, float, bool, json, null) and the part that set it."""

    type: str
    since: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The rows of one commit, or those that a compaction left of several.

    first_row, end_row: all its rows lie in first_row:end_row, where no other part has any.
    row_ids: the number of each row; None when row i of every file is the store's row first_row + i.
    """

    id: str
    first_row: int
    end_row: int
    rows: int
    row_ids: FileRef | None
    index: FileRef
    keys: FileRef
    blobs: FileRef | None
    tensors: Mapping[str, TensorFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One version of a store. Example: Snapshot(id=1, parent=0, num_rows=100, next_row=100, ...).

    created: UTC, ISO 8601.
    num_rows: rows that can be read.
    next_row: the number that the next row will get; numbers are never used twice.
    columns, tensors: the schema, union over the parts.
    parts: in ascending order of first_row.
    deleted: the numbers of the rows that are still in a part but can no longer be read.
    quarantine: Parquet files of what was refused.
    """

    id: int
    parent: int | None
    created: str
    message: str
    num_rows: int
    next_row: int
    columns: Mapping[str, ColumnSpec]
    tensors: Mapping[str, TensorSpec]
    parts: tuple[Part, ...]
    deleted: FileRef | None
    quarantine: tuple[FileRef, ...]
