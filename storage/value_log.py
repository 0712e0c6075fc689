"""The rows of a tensor column in the order in which they were computed, in a file that survives a kill."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from storage.disk import write_errors
from storage.manifest import TensorSpec

__all__ = ["ValueLog"]

_HEADER = struct.Struct("<QQ16s")
"""Rows of the record, values of the record, xxh3_128 of what follows: rows (int64), has (uint8), values."""


class ValueLog:
    """Append-only records; a record that was cut short or damaged ends the log when it is opened again.

    One writer at a time. Memory holds 17 bytes a row.
    """

    def __init__(self, path: Path, spec: TensorSpec) -> None:
        self._row_bytes = spec.row_bytes
        self._rows: list[np.ndarray] = []
        self._offsets: list[np.ndarray] = []
        self._folder = path.parent
        self._end = 0
        with write_errors(self._folder):
            self._file = path.open("ab+", buffering=1 << 20)
            self._recover(path.stat().st_size)

    def __len__(self) -> int:
        """Rows that were logged, with a value or without."""
        return sum(map(len, self._rows))

    def append(self, rows: np.ndarray, has: np.ndarray, values: memoryview) -> None:
        """Add a record.

        Args:
            rows: int64 (n,), global row numbers, none of them logged before.
            has: Bool (n,), whether a row has a value.
            values: Bytes of the values, in the order of rows.
        """
        count = int(has.sum())
        pieces = rows.astype("<i8").tobytes(), has.astype(np.uint8).tobytes(), values
        digest = xxhash.xxh3_128()
        for piece in pieces:
            digest.update(piece)
        with write_errors(self._folder):
            for piece in (_HEADER.pack(len(rows), count, digest.digest()), *pieces):
                self._file.write(piece)
            self._file.flush()
        self._note(rows, has)

    def _note(self, rows: np.ndarray, has: np.ndarray) -> None:
        start = self._end + _HEADER.size + 9 * len(rows)
        offsets = np.full(len(rows), -1, np.int64)
        count = int(has.sum())
        offsets[has] = start + np.arange(count) * self._row_bytes
        self._rows.append(np.asarray(rows, np.int64))
        self._offsets.append(offsets)
        self._end = start + count * self._row_bytes

    def _recover(self, size: int) -> None:
        self._file.seek(0)
        while (record := self._read_record(size - self._end)) is not None:
            self._note(*record)
        self._file.truncate(self._end)

    def _read_record(self, left: int) -> tuple[np.ndarray, np.ndarray] | None:
        head = self._file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            return None
        count, valued, digest = _HEADER.unpack(head)
        length = 9 * count + valued * self._row_bytes
        if valued > count or length > left - _HEADER.size:
            return None
        body = self._file.read(length)
        if xxhash.xxh3_128_digest(body) != digest:
            return None
        rows = np.frombuffer(body, "<i8", count)
        return rows, np.frombuffer(body, bool, count, 8 * count)

    def sorted_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The logged rows, int64 (n,) ascending, and the byte at which each value lies, or -1."""
        rows = np.concatenate([np.empty(0, np.int64), *self._rows])
        offsets = np.concatenate([np.empty(0, np.int64), *self._offsets])
        order = np.argsort(rows, kind="stable")
        return rows[order], offsets[order]

    def read(self, offsets: np.ndarray) -> Iterator[bytes]:
        """The values at some bytes, in their order; neighbours come together."""
        for run in np.split(offsets, np.flatnonzero(np.diff(offsets) != self._row_bytes) + 1):
            if len(run):
                yield os.pread(self._file.fileno(), len(run) * self._row_bytes, int(run[0]))

    def close(self) -> None:
        """Close the file, which stays; a record that the disk had no room for counts for nothing."""
        with contextlib.suppress(OSError):
            self._file.close()
