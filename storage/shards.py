"""Reading the shards of a part: mapped lazily, checked by policy, shared by all handles of the process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from storage.arrow_numpy import to_numpy
from storage.backends.base import Backend
from storage.column_cache import ColumnCache
from storage.errors import CorruptionError, TensorColumnError
from storage.key_index import KeyIndex
from storage.keys import NO_BLOB, KeyTable
from storage.manifest import FileRef, Part, Snapshot, TensorFile, TensorSpec
from storage.tensors import block_checksums, block_rows, read_block_checksums

__all__ = ["VERIFY_POLICIES", "Counters", "PartReader", "ReaderPool", "TensorShard"]

VERIFY_POLICIES = ("first-read", "always", "never")


@dataclass(slots=True)
class Counters:
    """Work of one store handle.

    bytes_read: bytes of blobs and tensors that were handed out.
    bytes_copied: bytes of those that were copied on the way; views of the map copy nothing.
    """

    bytes_read: int = 0
    bytes_copied: int = 0


class TensorShard:
    """One tensor column of one part. `array` is a read-only view of the map: (rows, *shape)."""

    def __init__(self, backend: Backend, ref: TensorFile, spec: TensorSpec) -> None:
        self._backend = backend
        self._ref = ref
        self._spec = spec
        self._dtype = np.dtype(spec.dtype)
        self._mapped, self._identity = backend.map(ref)
        self._raw = self._mapped[ref.offset : ref.offset + ref.rows * spec.row_bytes]
        self.array = self._shaped(self._raw)
        self._block_rows = block_rows(spec)
        self._checksums: np.ndarray | None = None
        self._unread = np.ones(-(-ref.rows // self._block_rows), bool)
        self._num_unread = len(self._unread)

    def _shaped(self, raw: np.ndarray) -> np.ndarray:
        return raw.view(self._dtype).reshape(-1, *self._spec.shape)

    def private(self, start: int, stop: int) -> np.ndarray:
        """Rows start:stop as a copy-on-write map of their own, safe to write to."""
        first, last = (self._ref.offset + row * self._spec.row_bytes for row in (start, stop))
        return self._shaped(self._backend.map_private(self._ref, self._identity, first, last))

    def check(self, rows: np.ndarray | slice, policy: str) -> None:
        """Compare the checksums of the blocks that hold `rows`; a block is compared once under "first-read".

        Raises:
            CorruptionError: With file, rows and byte range of the first block that differs.
        """
        if policy == "never" or (policy == "first-read" and not self._num_unread):
            return
        if isinstance(rows, slice):
            blocks = np.arange(rows.start // self._block_rows, -(-rows.stop // self._block_rows))
        else:
            blocks = np.unique(rows // self._block_rows)
        if policy == "first-read":
            blocks = blocks[self._unread[blocks]]
        for block in blocks.tolist():
            self._check_block(block)
        fresh = blocks[self._unread[blocks]]
        self._unread[fresh] = False
        self._num_unread = int(np.count_nonzero(self._unread)) if len(fresh) else self._num_unread

    def _check_block(self, block: int) -> None:
        step = self._block_rows * self._spec.row_bytes
        found = block_checksums(self._raw[block * step : (block + 1) * step], self._spec)[0]
        if found != self.checksums[block]:
            first = block * self._block_rows
            raise CorruptionError(
                f"{self._backend.place(self._ref.path)}: rows {first} to "
                f"{min(first + self._block_rows, self._ref.rows) - 1} "
                f"of the part (from byte {self._ref.offset + block * step}) do not match their checksum; "
                "copy the file back from a backup"
            )

    def damage(self) -> list[str]:
        """One text for each block that does not match its checksum."""
        texts = []
        for block in range(len(self._unread)):
            try:
                self._check_block(block)
            except CorruptionError as error:
                texts.append(str(error))
        return texts

    @property
    def checksums(self) -> np.ndarray:
        """uint64 (blocks,), from the footer of the file."""
        if self._checksums is None:
            place = self._backend.place(self._ref.path)
            try:
                content = read_block_checksums(self._mapped)
            except (pa.ArrowInvalid, OSError, KeyError, ValueError, TypeError) as error:
                raise CorruptionError(
                    f"{place}: the footer is damaged: {error}; copy the file back"
                ) from error
            if xxhash.xxh3_128_hexdigest(content) != self._ref.blocks_xxh3:
                raise CorruptionError(
                    f"{place}: the footer is not the one that was written; copy the file back"
                )
            self._checksums = np.frombuffer(content, ">u8")
        return self._checksums


class PartReader:
    """All files of one part. Rows are local to the part."""

    def __init__(self, backend: Backend, part: Part) -> None:
        self.backend = backend
        self.part = part
        self._lock = threading.Lock()
        self._keys: KeyTable | None = None
        self._row_ids: np.ndarray | None = None
        self._blobs: np.ndarray | None = None
        self._blob_unread = np.ones(part.rows, bool) if part.blobs else np.zeros(0, bool)
        self._tensors: dict[str, TensorShard] = {}
        self._index_checked = False

    def keys(self, policy: str) -> KeyTable:
        """The key table; its checksum is compared when it is opened unless policy is "never"."""
        with self._lock:
            if self._keys is None:
                ref = self.part.keys
                mapped, _ = self.backend.map(ref)
                if policy != "never":
                    _check_whole(mapped, self.backend, ref)
                try:
                    table = KeyTable(mapped)
                except (pa.ArrowInvalid, ValueError) as error:
                    raise CorruptionError(
                        f"{self.backend.place(ref.path)}: the key table is damaged: {error}"
                    ) from error
                if len(table) != self.part.rows:
                    raise CorruptionError(
                        f"{self.backend.place(ref.path)}: {len(table)} keys, the snapshot says "
                        f"{self.part.rows}; copy it back"
                    )
                self._keys = table
            return self._keys

    def global_rows(self, rows: np.ndarray) -> np.ndarray:
        """The store's numbers of rows of the part."""
        if self.part.row_ids is None:
            return rows + self.part.first_row
        if self._row_ids is None:
            self._row_ids = _read_row_file(self.backend, self.part.row_ids)
        return self._row_ids[rows]

    def local_row(self, row: int) -> int:
        """The row of the part that has a number of the store, which it must hold."""
        if self.part.row_ids is None:
            return row - self.part.first_row
        return int(self.global_rows(np.arange(self.part.rows)).searchsorted(row))

    def blob(self, row: int, policy: str) -> memoryview | None:
        """The bytes of a row's blob on the map, or None when it has none.

        Raises:
            CorruptionError: If they do not match their checksum.
        """
        keys = self.keys(policy)
        offset = int(keys.blob_offset[row])
        if offset == NO_BLOB or self.part.blobs is None:
            return None
        blobs = self._blob_map()
        num_bytes = int(keys.blob_bytes[row])
        if not 0 <= offset <= offset + num_bytes <= len(blobs):
            raise CorruptionError(
                f"{self._blob_place(row)}: its place lies outside the file; copy the part back"
            )
        blob = blobs[offset : offset + num_bytes].data
        if policy == "always" or (policy == "first-read" and self._blob_unread[row]):
            if xxhash.xxh3_128_digest(blob) != keys.blob_xxh3(row):
                raise CorruptionError(
                    f"{self._blob_place(row)}: its {num_bytes} bytes from byte {offset} do not match "
                    "their checksum; "
                    "copy the file back from a backup"
                )
            self._blob_unread[row] = False
        return blob

    def _blob_map(self) -> np.ndarray:
        with self._lock:
            if self._blobs is None:
                ref = self.part.blobs
                assert ref is not None
                self._blobs, _ = self.backend.map(ref)
            return self._blobs

    def _blob_place(self, row: int) -> str:
        ref = self.part.blobs
        assert ref is not None
        return f"{self.backend.place(ref.path)}: blob of key {self.keys('never').key(row)!r}"

    def tensor(self, name: str, spec: TensorSpec) -> TensorShard:
        """The shard of a tensor column.

        Raises:
            TensorColumnError: If these rows have none.
        """
        with self._lock:
            shard = self._tensors.get(name)
            if shard is None:
                ref = self.part.tensors.get(name)
                if ref is None:
                    first = self.part.first_row
                    raise TensorColumnError(
                        f"{self.backend.url}: rows {first} to {first + self.part.rows - 1} have no tensor "
                        f"{name!r}; compute it with add_column, or select other rows"
                    )
                shard = self._tensors[name] = TensorShard(self.backend, ref, spec)
            return shard

    def check_index(self, policy: str) -> Path:
        """The part's Parquet file, after its size and (by policy, once) its checksum were compared."""
        ref = self.part.index
        with self._lock:
            if policy == "always" or (policy == "first-read" and not self._index_checked):
                _check_whole(self.backend.map(ref)[0], self.backend, ref)
                self._index_checked = True
        return self.backend.local_file(ref)

    def column(self, name: str, kind: pa.DataType, policy: str) -> pa.Array:
        """One metadata column of the part as (rows,); nulls when the part does not have it."""
        path = self.check_index(policy)
        place = f"{self.backend.identity}/{self.part.index.path}"
        return _columns.get(place, f"{name} {kind}", lambda: self._read_column(path, name, kind))

    def _read_column(self, path: Path, name: str, kind: pa.DataType) -> pa.Array:
        with pq.ParquetFile(path) as file:
            if name not in file.schema_arrow.names:
                return pa.nulls(self.part.rows, kind)
            array = file.read(columns=[name]).column(0).cast(kind).combine_chunks()
        if len(array) != self.part.rows:
            place = self.backend.place(self.part.index.path)
            raise CorruptionError(
                f"{place}: column {name!r} has {len(array)} rows, the snapshot says {self.part.rows}; "
                "copy it back from a backup"
            )
        return array


def _read_row_file(backend: Backend, ref: FileRef) -> np.ndarray:
    """The row numbers of a file, ascending int64 (rows,), on its map."""
    mapped, _ = backend.map(ref)
    _check_whole(mapped, backend, ref)
    return to_numpy(pa.ipc.open_file(pa.py_buffer(mapped)).get_batch(0).column(0), np.int64)


def _check_whole(mapped: np.ndarray, backend: Backend, ref: FileRef) -> None:
    found = xxhash.xxh3_128_hexdigest(mapped.data)
    if found != ref.xxh3:
        raise CorruptionError(
            f"{backend.place(ref.path)}: the checksum of the file is {found}, the snapshot says {ref.xxh3}; "
            "copy it back from a backup"
        )


_columns = ColumnCache(256 << 20)
_readers: weakref.WeakValueDictionary[tuple[str, ...], PartReader] = weakref.WeakValueDictionary()
_readers_lock = threading.Lock()


class ReaderPool:
    """The readers that a store handle and its writers have opened; the process shares those of one file."""

    def __init__(self, backend: Backend, readers: Iterable[PartReader] = ()) -> None:
        self.backend = backend
        self._readers = {self._name(reader.part): reader for reader in readers}
        self._key_index: KeyIndex | None = None

    def get(self, part: Part) -> PartReader:
        """The reader of a part."""
        name = self._name(part)
        reader = self._readers.get(name)
        if reader is None:
            with _readers_lock:
                reader = _readers.get(name) or PartReader(self.backend, part)
                _readers[name] = self._readers[name] = reader
        return reader

    def deleted_rows(self, snapshot: Snapshot) -> np.ndarray:
        """The numbers of the deleted rows of a snapshot, ascending int64 (n,)."""
        if snapshot.deleted is None:
            return np.empty(0, np.int64)
        return _read_row_file(self.backend, snapshot.deleted)

    def key_index(self, parts: Sequence[Part], policy: str) -> KeyIndex:
        """The key index of a snapshot's parts; a newer snapshot extends the index of an older one."""
        held = self._key_index
        names = [part.index.path for part in parts]
        if held is not None and [part.index.path for part in held.parts] == names[: len(held.parts)]:
            if len(held.parts) < len(parts):
                held = held.extended(parts)
        else:
            held = KeyIndex(parts, self.get, policy)
        self._key_index = held
        return held

    def narrowed(self, parts: Iterable[Part]) -> ReaderPool:
        """A pool with the readers of these parts only, so that shards no longer in use are unmapped."""
        names = [self._name(part) for part in parts]
        pool = ReaderPool(self.backend, [self._readers[name] for name in names if name in self._readers])
        pool._key_index = self._key_index
        return pool

    def _name(self, part: Part) -> tuple[str, ...]:
        tensors = sorted(f"{name}={file.path}" for name, file in part.tensors.items())
        return (self.backend.identity, part.index.path, *tensors)
