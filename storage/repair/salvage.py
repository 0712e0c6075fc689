"""What can still be read of a part with broken files.

Keys stand in the key table and in the index, so one of the two may be lost. Metadata stands in the index
alone. A blob counts when its bytes match the checksum that the key table or the index has for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from storage.arrow_numpy import to_numpy
from storage.backends.base import Backend
from storage.blobs import Blob
from storage.checked_files import read_row_file
from storage.errors import CorruptionError, StorageError
from storage.keys import lmdb_key
from storage.manifest import Part, TensorSpec
from storage.shards import PartReader
from storage.tensors import block_rows

__all__ = ["Salvage"]


@dataclass(slots=True)
class Salvage:
    """A part with broken files.

    broken: path -> what is wrong with it.
    """

    backend: Backend
    part: Part
    broken: Mapping[str, str]
    reader: PartReader = field(init=False)
    _index: dict[str, pa.Array] | None = None
    _database: lmdb.Environment | None = None
    _keys_of_blobs: dict[str, str] | None = None

    def __post_init__(self) -> None:
        self.reader = PartReader(self.backend, self._with_found_size(self.part))

    def _with_found_size(self, part: Part) -> Part:
        """The part with the blob file as long as it is, so that what is left of it can be mapped."""
        if part.blobs is None or part.blobs.path not in self.broken:
            return part
        sizes = {file.path: file.bytes for file in self.backend.walk("blobs")}
        if part.blobs.path not in sizes:
            return part
        return replace(part, blobs=replace(part.blobs, bytes=sizes[part.blobs.path]))

    @property
    def has_index(self) -> bool:
        """Whether the metadata can be read."""
        return self.part.index.path not in self.broken

    @property
    def has_keys(self) -> bool:
        """Whether the key table can be read."""
        return self.part.keys.path not in self.broken

    def keys(self) -> list[bytes] | None:
        """The key of each row; None when neither the index nor the key table can be read."""
        if self.has_keys:
            table = self.reader.keys("first-read")
            return [table.encoded_key(row) for row in range(self.part.rows)]
        return [key.encode() for key in self._column("key").to_pylist()] if self.has_index else None

    def numbers(self) -> np.ndarray | None:
        """The store's number of each row, int64; None when they cannot be told."""
        ref = self.part.row_ids
        if ref is None:
            return np.arange(self.part.first_row, self.part.end_row)
        if ref.path not in self.broken:
            return read_row_file(self.backend, ref)
        return to_numpy(self._column("row"), np.int64) if self.has_index else None

    def blob(self, row: int) -> Blob | None:
        """A row's blob, None when it has none.

        Raises:
            StorageError: If it cannot be read or is not the one that was written.
        """
        if self.has_keys:
            return self.reader.blob(row, "always")
        digest = self._column("hash")[row].as_py()
        if digest is None:
            return None
        key = self._column("key")[row].as_py()
        # A row that shares its blob has no entry of its own.
        for candidate in (key, self._first_keys().get(digest, key)):
            found = self._from_lmdb(lmdb_key(candidate.encode()))
            if found is not None and xxhash.xxh3_128_hexdigest(found) == digest:
                return found
        raise CorruptionError("the key table is broken, and LMDB does not find the blob either")

    def _first_keys(self) -> Mapping[str, str]:
        """Checksum of a blob -> key of the first row that has it."""
        if self._keys_of_blobs is None:
            digests, keys = self._column("hash").to_pylist(), self._column("key").to_pylist()
            self._keys_of_blobs = dict(zip(reversed(digests), reversed(keys)))
        return self._keys_of_blobs

    def _from_lmdb(self, key: bytes) -> bytes | None:
        """What LMDB finds. A broken file is not given to the library, which trusts what it reads."""
        ref = self.part.blobs
        if ref is None or ref.path in self.broken:
            return None
        if self._database is None:
            path = str(self.backend.local_file(ref))
            self._database = lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=False)
        with self._database.begin() as transaction:
            return transaction.get(key)

    def close(self) -> None:
        """Release the database."""
        if self._database is not None:
            self._database.close()

    def _column(self, name: str) -> pa.Array:
        if self._index is None:
            with pq.ParquetFile(self.backend.local_file(self.part.index)) as file:
                names = [own for own in ("key", "hash", "row") if own in file.schema_arrow.names]
                table = file.read(columns=names)
            self._index = {own: table.column(own).combine_chunks() for own in names}
        return self._index[name]

    def is_whole(self, name: str) -> bool:
        """Whether no file of a tensor column is broken, also where no value lies."""
        ref = self.part.tensors[name]
        return ref.path not in self.broken and (ref.present is None or ref.present.path not in self.broken)

    def present_rows(self, name: str) -> np.ndarray:
        """The rows that have a value in a sparse column whose list of rows is whole, int64."""
        ref = self.part.tensors[name].present
        assert ref is not None
        return read_row_file(self.backend, ref)

    def whole_values(self, name: str, spec: TensorSpec) -> np.ndarray:
        """Which places of a tensor file are as they were written, bool (rows of the file,)."""
        ref = self.part.tensors[name]
        good = np.zeros(ref.rows, bool)
        if ref.present is not None and ref.present.path in self.broken:
            return good
        if ref.path not in self.broken:
            return ~good
        try:
            shard = self.reader.tensor(name, spec)
        except StorageError:
            return good
        step = block_rows(spec)
        for start in range(0, ref.rows, step):
            block = slice(start, min(start + step, ref.rows))
            try:
                shard.check(block, "always")
            except CorruptionError:
                continue
            good[block] = True
        return good
