"""Reading what a snapshot holds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.checked_files import check_whole
from storage.columns import SQL_TYPES
from storage.errors import CorruptionError, KeyNotFoundError, StorageError
from storage.handle import StoreHandle, unknown_name
from storage.index import QuarantineWriter
from storage.key_index import KeyIndex
from storage.manifest import ModelRecord
from storage.quarantine import open_records
from storage.query import SampleTable
from storage.user_tables import UserTable

__all__ = ["Reading"]


class Reading(StoreHandle):
    """The part of a store handle that reads rows."""

    _key_index: KeyIndex | None = None
    _samples: SampleTable | None = None

    @property
    def columns(self) -> dict[str, str]:
        """Metadata columns -> SQL type."""
        own = {"row": "BIGINT", "key": "VARCHAR", "hash": "VARCHAR", "bytes": "BIGINT"}
        return own | {name: SQL_TYPES[spec.type] for name, spec in self.snapshot.columns.items()}

    @property
    def tensor_columns(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Tensor columns -> dtype and shape of one row."""
        return {name: (np.dtype(spec.dtype), spec.shape) for name, spec in self.snapshot.tensors.items()}

    @property
    def tensor_models(self) -> dict[str, ModelRecord | None]:
        """Tensor columns -> the model that computed them, None where `add_column` was told none."""
        return {name: spec.model for name, spec in self.snapshot.tensors.items()}

    def unknown_column(self, name: str) -> str:
        """The text of an error about a metadata column that does not exist."""
        return unknown_name("column", name, list(self.columns), self.url)

    def query(self, sql: str, *, tables: Mapping[str, UserTable] | None = None) -> pa.Table:
        """The result of one SELECT over the table `samples`.

        Args:
            sql: For example "SELECT key, score FROM samples JOIN mine USING (key)".
            tables: Tables of yours by name: a pyarrow Table, a data frame, a mapping of columns, or the path
                of a Parquet or Arrow IPC file.

        Raises:
            QueryError: If it is anything else, or reads anything else.
        """
        if self._samples is None:
            self.backend.prefetch(part.index for part in self.snapshot.parts)
            paths = [str(self.part(i).check_index(self.policy)) for i in range(len(self.snapshot.parts))]
            self._samples = SampleTable(self.snapshot, paths, self.row_map.deleted)
        return self._samples.run(sql, tables)

    def key(self, row: int) -> str:
        """The key of a row."""
        part, local = self.row_map.locate_one(row)
        return self.part(part).keys(self.policy).key(local)

    def row(self, key: str) -> int:
        """The row of a key.

        Raises:
            KeyNotFoundError: If there is none; names the nearest keys.
        """
        if self._key_index is None:
            self._key_index = self._pool.key_index(self.snapshot.parts, self.policy)
        row = self._key_index.find(key, self.row_map.deleted)
        if row is None:
            near = self._nearest_keys(key)
            hint = f"; the nearest are {', '.join(map(repr, near))}" if near else ""
            raise KeyNotFoundError(f"{self.url}: snapshot {self.snapshot.id} has no key {key!r}{hint}")
        return row

    def blob(self, row: int) -> memoryview:
        """The encoded bytes of a row, on the map of their shard: nothing is copied.

        Raises:
            RowNotFoundError: If there is no such row.
            StorageError: If the row has no blob.
            CorruptionError: If the bytes do not match their checksum.
        """
        part, local = self.row_map.locate_one(row)
        blob = self.part(part).blob(local, self.policy)
        if blob is None:
            raise StorageError(
                f"{self.url}: row {row}, key {self.key(row)!r}, has no blob; select where bytes is not null"
            )
        self.counters.bytes_read += len(blob)
        return blob

    def prefetch(self, *tensors: str, blobs: bool = False) -> None:
        """Download shards of a store behind a URL, several at once, before they are read.

        A store on this machine has them already. The cache must have room for all of them.

        Args:
            tensors: Names of tensor columns.
            blobs: Also the blobs.
        """
        parts = self.snapshot.parts
        wanted = [part.tensors[name] for part in parts for name in tensors if name in part.tensors]
        self.backend.prefetch([*wanted, *(part.blobs for part in parts if blobs and part.blobs)])

    def quarantined(self, *, with_resolved: bool = False) -> pa.Table:
        """What was refused: key, place, reason, data.

        Args:
            with_resolved: Give also the records that were settled since, and those that settled them.
        """
        schema = QuarantineWriter.SCHEMA
        tables = []
        for ref in self.snapshot.quarantine:
            mapped, _ = self.backend.map(ref)
            check_whole(mapped, self.backend, ref)
            try:
                tables.append(pq.read_table(pa.BufferReader(pa.py_buffer(mapped)), schema=schema))
            except (pa.ArrowInvalid, OSError) as error:
                raise CorruptionError(
                    f"{self.backend.place(ref.path)}: this is no quarantine file: {error}"
                ) from error
        table = pa.concat_tables([_empty(schema), *tables])
        return table if with_resolved else open_records(table)

    def _nearest_keys(self, key: str) -> list[str]:
        """Up to three existing keys that look like `key`, sought by SQL so that no list of keys is built."""
        literal = "'" + key.replace("'", "''").replace("\0", "") + "'"
        table = self.query(
            f"SELECT key FROM samples ORDER BY jaro_winkler_similarity(key, {literal}) DESC LIMIT 3"
        )
        names: list[str] = table.column(0).to_pylist()
        return names


def _empty(schema: pa.Schema) -> pa.Table:
    # Schema.empty_table() imports pandas.
    return pa.table([pa.nulls(0, field.type) for field in schema], schema=schema)
