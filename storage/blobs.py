"""Blob shards: LMDB databases of encoded bytes, written once and then read through a map.

A sealed shard is an ordinary LMDB file that any LMDB reader opens. This library goes to a blob by its place
in the file, which the key table holds, instead of through LMDB's tree: no reader slots, no environment that
a fork or a second open could break, and a flipped bit in the tree cannot send a read outside the map.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np
import xxhash

from storage.disk import write_error
from storage.errors import CorruptionError, DuplicateKeyError, StorageError
from storage.files import start_writing
from storage.keys import NO_BLOB, lmdb_key

__all__ = ["Blob", "BlobWriter", "as_bytes"]

_BATCH_BYTES = 4 << 20  # Small batches stay in the cache of the processor on their way to the file.
_BATCH_ROWS = 8192
_FIRST_MAP_BYTES = 64 << 20
_MAX_BLOB_BYTES = (1 << 32) - 1
_NUM_PROBES = 64
_NUM_REMEMBERED = 8192

Blob = bytes | bytearray | memoryview


def as_bytes(blob: Blob, place: str) -> bytes:
    """A blob that nobody changes while it waits to be written; `place` names the row in errors.

    Raises:
        StorageError: If it is no bytes, or of 4 GiB or more, which LMDB cannot hold.
    """
    try:
        view = memoryview(blob)
    except TypeError:
        raise StorageError(
            f"{place}: the blob is {type(blob).__name__}, a blob is bytes; encode it first"
        ) from None
    if view.nbytes > _MAX_BLOB_BYTES:
        raise StorageError(
            f"{place}: a blob of {view.nbytes} bytes is too large, LMDB holds up to {_MAX_BLOB_BYTES}; "
            "split it over several rows"
        )
    return blob if type(blob) is bytes else bytes(view)


@dataclass(slots=True)
class _Pending:
    """A blob that waits to be put."""

    row: int
    key: bytes  # of LMDB
    blob: Blob
    first: tuple[int, bytes] | None = None  # row and LMDB key of the blob that has the same checksum


class _Remembered:
    """The blobs seen last, by checksum: as many as two generations hold."""

    def __init__(self) -> None:
        self._recent: dict[bytes, tuple[int, bytes]] = {}
        self._older: dict[bytes, tuple[int, bytes]] = {}

    def first(self, digest: bytes, blob: _Pending) -> tuple[int, bytes] | None:
        """Row and LMDB key of the first blob with this checksum; None, and this one is remembered."""
        found = self._recent.get(digest) or self._older.get(digest)
        if found is None:
            if len(self._recent) == _NUM_REMEMBERED:
                self._recent, self._older = {}, self._recent
            self._recent[digest] = (blob.row, blob.key)
        return found


class BlobWriter:
    """Streams blobs into a new LMDB database at `directory`; memory holds two batches and 32 bytes a row.

    A blob that is equal to one of the last 8,192 different ones is not written again: its row gets the place
    of the first, and no LMDB entry of its own. The checksums and keys of up to twice as many are remembered.

    One batch is put, and its large blobs are located, by a thread while the next is collected. What it fails
    with is raised by the call that hands over the next batch, or by `seal`.
    """

    def __init__(self, directory: Path, *, map_bytes: int = _FIRST_MAP_BYTES) -> None:
        self.path = directory / "data.mdb"
        # One writer, no reader, a file that counts for nothing until it is installed: no lock and no sync.
        self._env = lmdb.open(
            str(directory), map_size=map_bytes, lock=False, sync=False, metasync=False, writemap=False
        )
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self._page_bytes: int = self._env.stat()["psize"]
        self._batch: list[_Pending] = []
        self._batch_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blobs")
        self._putting: Future[None] | None = None
        self._lengths = array("q")
        self._offsets = array("q")  # NO_BLOB until a blob was located
        self._digests = bytearray()
        self._seen = _Remembered()
        self._shared: list[tuple[int, int]] = []  # a row, and the one that it shares the blob of
        self._closed = False
        self.count = 0

    def add(self, key: bytes, blob: Blob | None) -> None:
        """Append one row; None for a row without a blob. The blob must not be changed until `seal`."""
        if blob is None:
            self.add_absent(1)
            return
        num_bytes = memoryview(blob).nbytes
        digest = xxhash.xxh3_128_digest(blob)
        mine = _Pending(row=len(self._lengths), key=lmdb_key(key), blob=blob)
        mine.first = self._seen.first(digest, mine) if num_bytes else None
        self._batch.append(mine)
        self._lengths.append(num_bytes)
        self._offsets.append(NO_BLOB)
        self._digests += digest
        self._batch_bytes += num_bytes
        self.count += 1
        if self._batch_bytes >= _BATCH_BYTES or len(self._batch) >= _BATCH_ROWS:
            self._hand_over()

    def add_absent(self, count: int) -> None:
        """Append rows without a blob."""
        self._lengths.extend([NO_BLOB] * count)
        self._offsets.extend([NO_BLOB] * count)
        self._digests += bytes(16 * count)

    def digest(self, row: int) -> str:
        """xxh3_128 of a row's blob as 32 hexadecimal digits."""
        return self._digests[16 * row : 16 * row + 16].hex()

    def _hand_over(self) -> None:
        """Have the batch put, once the one before it is in."""
        self._wait()
        batch, num_bytes = self._batch, self._batch_bytes
        self._batch, self._batch_bytes = [], 0
        self._putting = self._thread.submit(self._put, batch, num_bytes)

    def _wait(self) -> None:
        putting, self._putting = self._putting, None
        if putting is not None:
            putting.result()

    def _put(self, batch: list[_Pending], num_bytes: int) -> None:
        """Commit a batch. A full map loses the transaction, but the batch is put again in a larger one."""
        while True:
            try:
                shared = []
                with self._env.begin(write=True, buffers=True) as transaction:
                    for one in batch:
                        if one.first is not None and transaction.get(one.first[1]) == one.blob:
                            shared.append((one.row, one.first[0]))
                        elif not transaction.put(one.key, one.blob, overwrite=False):
                            raise DuplicateKeyError(f"LMDB key {one.key!r} is already in {self.path}")
            except lmdb.MapFullError:
                size = self._env.info()["map_size"]
                self._env.set_mapsize(max(2 * size, size + 2 * num_bytes))
            except lmdb.Error as error:
                raise write_error(self.path.parent, error) from error
            else:
                start_writing(self._fd)
                self._shared += shared
                # LMDB gives a value of a page or more pages of its own, and they stay where they are.
                others = {row for row, _ in shared}
                self._locate(
                    (one.row, one.key)
                    for one in batch
                    if self._lengths[one.row] >= self._page_bytes and one.row not in others
                )
                return

    def _locate(self, rows: Iterable[tuple[int, bytes]]) -> None:
        """Find where the blobs of some rows, given with their LMDB keys, lie in the file."""
        base: int | None = None
        with self._env.begin(buffers=True) as transaction:
            for row, key in rows:
                value = transaction.get(key)
                if value is None:
                    raise CorruptionError(f"{self.path}: blob {row} is not in the database it was put into")
                address = np.frombuffer(value, np.uint8).__array_interface__["data"][0]
                if base is None:
                    base = _map_base(address, self._page_bytes)
                self._offsets[row] = address - base

    def seal(self, key_of: Callable[[int], bytes]) -> tuple[np.ndarray, np.ndarray, bytes]:
        """Finish the database and find where each blob lies in its file.

        Args:
            key_of: Gives the key of a row, counted in the order of `add`.

        Returns:
            int64 (rows,) byte offsets (-1 without a blob), int64 (rows,) lengths, 16 checksum bytes per row.
        """
        self._wait()
        if self._batch:
            self._put(self._batch, self._batch_bytes)
            self._batch = []
        lengths = np.frombuffer(self._lengths, np.int64).copy()
        is_missing = (lengths > 0) & (np.frombuffer(self._offsets, np.int64) == NO_BLOB)
        shared, first = np.array(self._shared, np.int64).reshape(-1, 2).T
        is_missing[shared] = False
        self._locate((row, lmdb_key(key_of(row))) for row in np.flatnonzero(is_missing).tolist())
        offsets = np.frombuffer(self._offsets, np.int64).copy()
        offsets[lengths == 0] = 0
        offsets[shared] = offsets[first]
        self.close()
        self._probe(offsets, lengths)
        return offsets, np.maximum(lengths, 0), bytes(self._digests)

    def _probe(self, offsets: np.ndarray, lengths: np.ndarray) -> None:
        """Read some blobs back by their place, so that a surprise in LMDB's layout is found now."""
        rows = np.flatnonzero(lengths > 0)
        with self.path.open("rb") as file:
            for row in rows[:: max(1, len(rows) // _NUM_PROBES)].tolist():
                file.seek(offsets[row])
                if xxhash.xxh3_128_hexdigest(file.read(lengths[row])) != self.digest(row):
                    raise CorruptionError(
                        f"{self.path}: blob {row} reads back differently from byte {offsets[row]}"
                    )

    def close(self) -> None:
        """Close the database; a second call does nothing."""
        if not self._closed:
            self._thread.shutdown()
            self._env.close()
            os.close(self._fd)
            self._closed = True


def _map_base(address: int, page_bytes: int) -> int:
    """Where LMDB's map begins, from the address of one value.

    A value begins in the page whose header opens with the page's number, even if it runs over several.
    """
    page = address - address % page_bytes
    number = int.from_bytes(ctypes.string_at(page, 8), "little")
    return page - number * page_bytes
