"""Reading the shards of a part: mapped lazily, checked by policy, shared by all handles of the process."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from storage.backends.base import Backend
from storage.checked_files import check_whole, read_row_file
from storage.errors import CorruptionError, TensorColumnError
from storage.fork_locks import new_lock
from storage.index_file import IndexFile
from storage.key_index import KeyIndex
from storage.keys import NO_BLOB, KeyTable
from storage.manifest import FileRef, Part, Snapshot, TensorSpec
from storage.tensor_shard import TensorShard

__all__ = ["VERIFY_POLICIES", "Counters", "PartReader", "ReaderPool"]

VERIFY_POLICIES = ("first-read", "always", "never")


@dataclass(slots=True)
class Counters:
    """Work of one store handle.

    bytes_read: bytes of blobs and tensors that were handed out.
    bytes_copied: bytes of those that were copied on the way; views of the map copy nothing.
    """

    bytes_read: int = 0
    bytes_copied: int = 0


class PartReader:
    """All files of one part. Rows are local to the part."""

    def __init__(self, backend: Backend, part: Part) -> None:
        self.backend = backend
        self.part = part
        self._lock = new_lock(self, "_lock")
        self._mapped: dict[FileRef, Hashable] = {}
        self._keys: KeyTable | None = None
        self._row_ids: np.ndarray | None = None
        self._blobs: np.ndarray | None = None
        self._blob_unread = np.empty(0, bool)
        self._tensors: dict[str, TensorShard] = {}
        self._index_checked = False
        self._index: IndexFile | None = None

    def is_current(self) -> bool:
        """Whether the files that were mapped still have their names, as far as can be seen at a glance."""
        mapped = list(self._mapped.items())  # Other threads map more.
        return all(self.backend.current_identity(ref) in (None, seen) for ref, seen in mapped)

    def _map(self, ref: FileRef) -> np.ndarray:
        mapped, self._mapped[ref] = self.backend.map(ref)
        _release_evicted(self.backend)
        return mapped

    def release_evicted(self) -> None:
        """Unmap blobs and tensors that the cache let go; they are downloaded again when they are asked for.

        What was handed out stays mapped. Nothing happens while another thread is busy with this part.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            for ref in self.backend.evicted(self._mapped):
                del self._mapped[ref]
                if ref == self.part.blobs:
                    self._blobs = None
                for name, file in self.part.tensors.items():
                    if ref == file:
                        self._tensors.pop(name, None)
        finally:
            self._lock.release()

    def keys(self, policy: str) -> KeyTable:
        """The key table; its checksum is compared when it is opened unless policy is "never"."""
        with self._lock:
            if self._keys is None:
                ref = self.part.keys
                mapped = self._map(ref)
                if policy != "never":
                    check_whole(mapped, self.backend, ref)
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
            self._row_ids = read_row_file(self.backend, self.part.row_ids)
        ids: np.ndarray = self._row_ids[rows]
        return ids

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
                mapped = self._map(ref)
                self._blob_unread = np.ones(self.part.rows, bool)
                self._blobs = mapped
            return self._blobs

    def _blob_place(self, row: int) -> str:
        ref = self.part.blobs
        assert ref is not None
        return f"{self.backend.place(ref.path)}: blob of key {self.keys('never').key(row)!r}"

    def tensor(self, name: str, spec: TensorSpec) -> TensorShard:
        """The shard of a tensor column, which may lack rows of the part.

        Raises:
            TensorColumnError: If no row of the part has a value.
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
                shard = self._tensors[name] = TensorShard(self.backend, ref, spec, self.part.rows)
                self._mapped[ref] = shard.identity
                _release_evicted(self.backend)
            return shard

    def check_index(self, policy: str) -> Path:
        """The part's Parquet file, after its size and (by policy, once) its checksum were compared."""
        ref = self.part.index
        with self._lock:
            if policy == "always" or (policy == "first-read" and not self._index_checked):
                check_whole(self._map(ref), self.backend, ref)
                self._index_checked = True
        return self.backend.local_file(ref)

    def column(self, name: str, kind: pa.DataType, policy: str, rows: np.ndarray | None = None) -> pa.Array:
        """One metadata column of the part, or some rows of it; nulls when the part does not have it."""
        path = self.check_index(policy)
        if self._index is None:
            ref = self.part.index
            self._index = IndexFile(
                path, self.backend.place(ref.path), self.part.rows, f"{self.backend.identity}/{ref.path}"
            )
        return self._index.column(name, kind) if rows is None else self._index.take(name, kind, rows)


_readers: weakref.WeakValueDictionary[tuple[str, ...], PartReader] = weakref.WeakValueDictionary()
_readers_lock = new_lock(sys.modules[__name__], "_readers_lock")


def _release_evicted(backend: Backend) -> None:
    if not backend.must_release():
        return
    for reader in list(_readers.values()):
        if reader.backend.identity == backend.identity:
            reader.release_evicted()


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
                reader = _readers.get(name)
                if reader is None or not reader.is_current():
                    reader = PartReader(self.backend, part)
                _readers[name] = self._readers[name] = reader
        return reader

    def deleted_rows(self, snapshot: Snapshot) -> np.ndarray:
        """The numbers of the deleted rows of a snapshot, ascending int64 (n,)."""
        if snapshot.deleted is None:
            return np.empty(0, np.int64)
        return read_row_file(self.backend, snapshot.deleted)

    def key_index(self, parts: Sequence[Part], policy: str) -> KeyIndex:
        """The key index of a snapshot's parts; a newer snapshot extends the index of an older one."""
        held = self._key_index
        names = [part.index.path for part in parts]
        if held is not None and [part.index.path for part in held.parts] == names[: len(held.parts)]:
            if len(held.parts) < len(parts):
                held = held.extended(parts)
        else:
            self.backend.prefetch(part.keys for part in parts)
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
