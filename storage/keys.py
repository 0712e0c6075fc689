"""The key table of a part: row -> key and place of the blob, key -> row, all from one mapped Arrow file.

Nothing is held in Python objects, so tables of any size open in microseconds and are shared by forked
workers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from array import array
from bisect import bisect_left
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from storage.arrow_numpy import from_numpy, pick_list, to_numpy
from storage.errors import ColumnError

__all__ = ["NO_BLOB", "KeyTable", "KeyTableWriter", "SortedHashes", "encode_key", "hash_key", "lmdb_key"]

NO_BLOB = -1
_LMDB_MAX_KEY_BYTES = 511
_RUN_ROWS = 1 << 16
_RANGE_HASHES = 8
_FIRST_SLOT_BITS = 12
_SLOTS_PER_KEY = 8

_SCHEMA = pa.schema(
    [
        pa.field("key", pa.large_string(), nullable=False),
        pa.field("blob_offset", pa.int64(), nullable=False),
        pa.field("blob_bytes", pa.int64(), nullable=False),
        pa.field("blob_xxh3", pa.binary(16), nullable=False),
        pa.field("sorted_hash", pa.uint64(), nullable=False),
        pa.field("sorted_row", pa.int64(), nullable=False),
    ]
)


def encode_key(key: str) -> bytes:
    """UTF-8 of a key.

    Raises:
        ColumnError: If it is not text, is empty, or has no UTF-8 form.
    """
    if not isinstance(key, str):
        raise ColumnError(f"key {key!r} is {type(key).__name__}, a key is text; give str(key)")
    if not key:
        raise ColumnError("a key is empty; every row needs a key of one character or more")
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise ColumnError(
            f"key {key!r} is not valid UTF-8 text; decode it with errors='replace' first"
        ) from None


def hash_key(key: bytes) -> int:
    """xxh3_64 of a key's UTF-8, by which the table is searched."""
    return xxhash.xxh3_64_intdigest(key)


def lmdb_key(key: bytes) -> bytes:
    """The key under which LMDB holds a blob: UTF-8, or byte FF and SHA-256 beyond 511 bytes.

    FF never occurs in UTF-8, so the two kinds cannot meet.
    """
    return key if len(key) <= _LMDB_MAX_KEY_BYTES else b"\xff" + hashlib.sha256(key).digest()


class KeyTableWriter:
    """Collects the keys of one part. Key text goes to a file; memory holds about 50 bytes a row."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._file = spool.open("xb+")
        self._ends = array("q", [0])
        self._hashes = array("Q")
        self._slots = bytearray(1 << _FIRST_SLOT_BITS)
        self._slot_shift = 64 - _FIRST_SLOT_BITS
        self._recent: dict[int, int] = {}
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []
        self._collided: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, key: bytes, key_hash: int) -> None:
        """Append a key that `find` does not know."""
        row = len(self._hashes)
        if self._slots[key_hash >> self._slot_shift] and self._candidates(key_hash):
            self._collided[key] = row
        else:
            self._slots[key_hash >> self._slot_shift] = 1
            self._recent[key_hash] = row
        self._hashes.append(key_hash)
        self._file.write(key)
        self._ends.append(self._ends[-1] + len(key))
        if len(self._recent) >= _RUN_ROWS:
            self._freeze_recent()
        if row * _SLOTS_PER_KEY > len(self._slots):
            self._add_slots()

    def find(self, key: bytes, key_hash: int) -> int | None:
        """The row of a key that was added before, or None."""
        if not self._slots[key_hash >> self._slot_shift]:
            return None
        for row in self._candidates(key_hash):
            if self.key(row) == key:
                return row
        return self._collided.get(key)

    def key(self, row: int) -> bytes:
        """The key of one row."""
        self._file.flush()
        return os.pread(self._file.fileno(), self._ends[row + 1] - self._ends[row], self._ends[row])

    def hashes(self) -> np.ndarray:
        """uint64 (rows,): the hash of each row's key."""
        return np.frombuffer(self._hashes, np.uint64)

    def _candidates(self, key_hash: int) -> list[int]:
        rows = [self._recent[key_hash]] if key_hash in self._recent else []
        for hashes, positions in self._runs:
            at = int(np.searchsorted(hashes, np.uint64(key_hash)))
            if at < len(hashes) and hashes[at] == key_hash:
                rows.append(int(positions[at]))
        return rows

    def _add_slots(self) -> None:
        """Spread the leading bits of the hashes over more slots; an empty slot tells that a key is new."""
        self._slot_shift -= 2
        slots = np.zeros(1 << (64 - self._slot_shift), np.uint8)
        slots[self.hashes() >> np.uint64(self._slot_shift)] = 1
        self._slots = bytearray(slots)

    def _freeze_recent(self) -> None:
        """Turn the newest keys into a sorted run, merged with runs of like size, so that they stay few."""
        hashes = np.fromiter(self._recent.keys(), np.uint64, len(self._recent))
        rows = np.fromiter(self._recent.values(), np.int64, len(self._recent))
        self._recent = {}
        while self._runs and len(self._runs[-1][0]) <= len(hashes):
            older_hashes, older_rows = self._runs.pop()
            hashes, rows = np.concatenate([older_hashes, hashes]), np.concatenate([older_rows, rows])
        order = np.argsort(hashes, kind="stable")
        self._runs.append((hashes[order], rows[order]))

    def write(self, path: Path, blob_offsets: np.ndarray, blob_bytes: np.ndarray, blob_xxh3: bytes) -> None:
        """Write the table; one entry per row in each argument, 16 bytes per row in blob_xxh3."""
        self._file.flush()
        rows = len(self)
        hashes = self.hashes()
        order = np.argsort(hashes, kind="stable")
        with pa.OSFile(str(self._spool)) as spool:
            text = pa.LargeStringArray.from_buffers(rows, pa.py_buffer(self._ends), spool.read_buffer())
        columns = [
            text,
            from_numpy(blob_offsets),
            from_numpy(blob_bytes),
            pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), rows, [None, pa.py_buffer(blob_xxh3)]),
            from_numpy(hashes[order]),
            from_numpy(order),
        ]
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
            writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))

    def close(self) -> None:
        """Drop the spooled key text."""
        with contextlib.suppress(OSError):
            self._file.close()  # What was not written yet is not wanted; the disk may be full.
        self._spool.unlink(missing_ok=True)


class SortedHashes:
    """Search in ascending uint64 hashes, through a directory of where each range of them begins.

    The directory is made at the first search and holds up to one byte a hash.
    """

    __slots__ = ("_array", "_shift", "_starts", "values")

    def __init__(self, hashes: np.ndarray) -> None:
        self._array = np.ascontiguousarray(hashes)
        self.values = self._array.data
        self._shift = 64 - (len(hashes) // _RANGE_HASHES).bit_length()
        self._starts: memoryview | None = None

    def first(self, key_hash: int) -> int:
        """The first position whose hash is not below `key_hash`."""
        starts = self._starts
        if starts is None:
            starts = self._starts = self._directory()
        part = key_hash >> self._shift
        return bisect_left(self.values, key_hash, starts[part], starts[part + 1])

    def _directory(self) -> memoryview:
        """(ranges + 1,): the position at which each range of hashes begins, and how many hashes there are."""
        lowest = np.arange(1 << (64 - self._shift), dtype=np.uint64) << np.uint64(self._shift % 64)
        starts = np.append(self._array.searchsorted(lowest), len(self._array))
        return starts.astype(np.min_scalar_type(len(self._array))).data


class KeyTable:
    """A key table on a map of its file. Rows are local to the part."""

    def __init__(self, mapped: np.ndarray) -> None:
        batch = pa.ipc.open_file(pa.py_buffer(mapped)).get_batch(0)
        rows = batch.num_rows
        self._keys = batch.column(0)
        _, ends, text = self._keys.buffers()
        self._ends = np.frombuffer(ends, np.int64, rows + 1).data
        self._text = memoryview(text).cast("B")
        self.blob_offset = to_numpy(batch.column(1), np.int64)
        self.blob_bytes = to_numpy(batch.column(2), np.int64)
        self._blob_xxh3 = memoryview(batch.column(3).buffers()[1])
        self.sorted_hash = to_numpy(batch.column(4), np.uint64)
        self.sorted_row = to_numpy(batch.column(5), np.int64)
        self._hashes = SortedHashes(self.sorted_hash)
        self._rows = self.sorted_row.data

    def __len__(self) -> int:
        return len(self.blob_offset)

    def key(self, row: int) -> str:
        """The key of one row."""
        return str(self.encoded_key(row), "utf-8")

    def keys(self, rows: np.ndarray) -> list[str]:
        """The keys of some rows, int64 (n,)."""
        picked: list[str] = pick_list(self._keys, rows)
        return picked

    def encoded_key(self, row: int) -> bytes:
        """UTF-8 of the key of one row."""
        return bytes(self._text[self._ends[row] : self._ends[row + 1]])

    def blob_xxh3(self, row: int) -> bytes:
        """xxh3_128 of the row's blob, 16 bytes, most significant first."""
        return bytes(self._blob_xxh3[16 * row : 16 * row + 16])

    def find(self, key: bytes, key_hash: int) -> int | None:
        """The row of a key, or None."""
        hashes, ends = self._hashes.values, self._ends
        at = self._hashes.first(key_hash)
        while at < len(hashes) and hashes[at] == key_hash:
            row = self._rows[at]
            if self._text[ends[row] : ends[row + 1]] == key:
                return row
            at += 1
        return None

    def rows_of_hash(self, key_hash: int) -> np.ndarray:
        """The rows whose key has a hash, int64 (n,)."""
        first, last = (self.sorted_hash.searchsorted(np.uint64(key_hash), side) for side in ("left", "right"))
        return self.sorted_row[first:last]

    def shared_hashes(self, hashes: np.ndarray) -> np.ndarray:
        """Those of `hashes` (uint64) that this table has too."""
        at = np.minimum(self.sorted_hash.searchsorted(hashes), len(self) - 1)
        present: np.ndarray = hashes[self.sorted_hash[at] == hashes]
        return present
