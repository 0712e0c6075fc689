"""The feature store: rows with a key, metadata, encoded bytes and tensors, in immutable snapshots."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.arrow_numpy import to_numpy
from storage.backends import Backend, LocalBackend, find_backend
from storage.column import TensorColumn
from storage.columns import SQL_TYPES
from storage.compaction import compact_parts
from storage.deletion import delete_rows
from storage.errors import KeyNotFoundError, SnapshotNotFoundError, StorageError, TensorColumnError
from storage.features import Values, add_tensor_column, newest_store
from storage.garbage import GcReport, collect_garbage
from storage.history import SnapshotDiff, diff_snapshots, list_tags, read_log, remove_tag, write_tag
from storage.index import QuarantineWriter
from storage.integrity import VerifyReport, verify_store
from storage.key_index import KeyIndex
from storage.leases import hold_snapshot
from storage.manifest import Snapshot
from storage.query import SampleTable
from storage.rows import RowMap
from storage.schema_change import drop_column, rename_column
from storage.shards import VERIFY_POLICIES, Counters, PartReader, ReaderPool
from storage.snapshots import create_store, list_snapshot_ids, newest_snapshot, publish, read_snapshot
from storage.tensors import tensor_spec
from storage.view import View
from storage.writer import Writer

__all__ = ["FeatureStore"]


class FeatureStore:
    """One snapshot of a store, opened for reading; writers publish new snapshots beside it.

    A handle never changes what it shows: after a commit, `refresh()` gives a handle on the newest snapshot.
    It can be pickled and used after a fork, and may be read from several threads.
    """

    def __init__(
        self,
        backend: Backend,
        snapshot: Snapshot,
        verify: str,
        counters: Counters | None = None,
        readers: ReaderPool | None = None,
    ) -> None:
        if verify not in VERIFY_POLICIES:
            raise StorageError(f"verify={verify!r} is none of {', '.join(VERIFY_POLICIES)}")
        self.backend = backend
        self.snapshot = snapshot
        self.policy = verify
        self.counters = counters or Counters()
        self._pool = readers or ReaderPool(backend)
        self._readers: list[PartReader | None] = [None] * len(snapshot.parts)
        self._lease = hold_snapshot(backend, snapshot.id)
        self.row_map = RowMap(snapshot, self._pool)
        self._key_index: KeyIndex | None = None
        self._samples: SampleTable | None = None

    @classmethod
    def create(cls, path: str | Path | Backend, exist_ok: bool = False) -> FeatureStore:
        """Make an empty store, with its folders; with exist_ok an existing one is opened.

        Raises:
            StoreExistsError: If there is a store (and not exist_ok), or a folder with other files.
        """
        backend = find_backend(path)
        if exist_ok and list_snapshot_ids(backend):
            return cls.open(backend)
        return cls(backend, create_store(backend), "first-read")

    @classmethod
    def open(
        cls, path: str | Path | Backend, snapshot: int | None = None, verify: str = "first-read"
    ) -> FeatureStore:
        """Open the newest snapshot, or the given one.

        Args:
            path: Folder of the store, or the backend that knows where it lies.
            snapshot: Number of a snapshot.
            verify: Compare checksums when data is read for the first time in this process ("first-read"),
                every time ("always"), or not ("never"). Sizes are always compared.

        Raises:
            StoreNotFoundError: If the path holds no store; names the nearest one.
            SnapshotNotFoundError, ManifestError, FormatVersionError: If the snapshot cannot be used.
        """
        backend = find_backend(path)
        found = newest_snapshot(backend) if snapshot is None else read_snapshot(backend, snapshot)
        return cls(backend, found, verify)

    @property
    def url(self) -> str:
        """Where the store lies, as text: the path of a folder, or a URL."""
        return self.backend.url

    @property
    def path(self) -> Path:
        """The folder of the store.

        Raises:
            StorageError: If the store does not lie in a folder.
        """
        if isinstance(self.backend, LocalBackend):
            return self.backend.path
        raise StorageError(f"{self.url}: the store does not lie in a folder; use url instead of path")

    def __repr__(self) -> str:
        return f"FeatureStore({self.url!r}, snapshot={self.snapshot.id}, {self.snapshot.num_rows} rows)"

    def __len__(self) -> int:
        return self.snapshot.num_rows

    def __reduce__(self) -> tuple[Any, ...]:
        return FeatureStore.open, (self.backend, self.snapshot.id, self.policy)

    # Writing

    def writer(
        self,
        *,
        message: str = "",
        tensors: Mapping[str, tuple[np.typing.DTypeLike, Sequence[int]]] | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> Writer:
        """Begin a commit of new rows on top of the newest snapshot.

        Args:
            message: Kept in the snapshot.
            tensors: Tensor columns that every row will have: name -> (dtype, shape of one row).
            columns: Types of metadata columns to be fixed beforehand: name -> string, int, float, bool or
                json.
        """
        specs = {
            name: tensor_spec(name, dtype, tuple(shape)) for name, (dtype, shape) in (tensors or {}).items()
        }
        return Writer(self._pool, message=message, tensors=specs, columns=columns or {})

    def append(self, rows: Iterable[Mapping[str, Any]], message: str = "append") -> Snapshot:
        """Commit rows given as mappings: "key", optional "blob" and "tensors", any columns."""
        with self.writer(message=message) as writer:
            for row in rows:
                writer.add(**row)
        assert writer.snapshot is not None
        return writer.snapshot

    def add_column(
        self,
        name: str,
        values: Values,
        *,
        dtype: np.typing.DTypeLike,
        shape: Sequence[int],
        message: str = "",
    ) -> Snapshot:
        """Write a tensor column beside the rows of the newest snapshot that lack it.

        Args:
            name: Letters, digits, "_", "-" and ".".
            values: (key, array) for every row in any order, or a function from a View of n rows
                to an array (n, *shape).
            dtype: numpy dtype: bool, integer or float.
            shape: Of one row.

        Raises:
            TensorColumnError: If a row gets no value, a value does not fit, or every row has the column.
            CommitConflictError: If another writer wrote the same column meanwhile.
        """
        spec = tensor_spec(name, dtype, tuple(shape))
        return add_tensor_column(newest_store(self), name, values, spec, message or f"add column {name}")

    def drop_column(self, name: str, message: str = "") -> Snapshot:
        """Publish a snapshot without a metadata or tensor column. The name may then be used for another type.

        Raises:
            ColumnError: If there is no such column.
        """
        return drop_column(self._pool, name, message or f"drop column {name}")

    def rename_column(self, name: str, new_name: str, message: str = "") -> Snapshot:
        """Publish a snapshot in which a metadata or tensor column has another name.

        Raises:
            ColumnError: If there is no such column, or the new name is taken or cannot be used.
        """
        return rename_column(self._pool, name, new_name, message or f"rename column {name} to {new_name}")

    def restore(self, snapshot_id: int, message: str = "") -> Snapshot:
        """Publish a new snapshot with the content of an earlier one. Row numbers are not used again."""
        old = read_snapshot(self.backend, snapshot_id)
        text = message or f"restore snapshot {snapshot_id}"
        return publish(self.backend, lambda newest: replace(old, message=text, next_row=newest.next_row))

    def delete(self, rows: str | View, message: str = "") -> Snapshot:
        """Publish a snapshot without some rows: those that meet an SQL condition now, or those of a view.

        Earlier snapshots keep them. Their keys may be used again, their numbers never are.
        """
        view = newest_store(self).select(rows) if isinstance(rows, str) else rows
        return delete_rows(self._pool, view.rows, message or f"delete {len(view)} rows")

    def compact(self, *, max_part_bytes: int = 1 << 30, message: str = "compact") -> Snapshot:
        """Publish a snapshot in which small neighbouring parts are joined and deleted rows left out.

        Rows keep their numbers. Parts are joined while they have the same tensor columns and stay below the
        size.

        Raises:
            CommitConflictError: If another writer changed the same parts meanwhile; appends do not matter.
        """
        return compact_parts(self._pool, max_part_bytes, message)

    # History

    def log(self) -> list[Snapshot]:
        """This snapshot and those it was made from, newest first."""
        return read_log(self.backend, self.snapshot)

    def diff(self, old: int | str, new: int | str) -> SnapshotDiff:
        """What changed from one snapshot to another, given by number or tag."""
        return diff_snapshots(self._pool, self.at(old).snapshot, self.at(new).snapshot)

    def at(self, snapshot: int | str) -> FeatureStore:
        """A handle on another snapshot of the store, given by number or tag.

        Raises:
            SnapshotNotFoundError: If there is none.
        """
        if isinstance(snapshot, str):
            tags = self.tags()
            if snapshot not in tags:
                raise SnapshotNotFoundError(unknown_name("tag", snapshot, list(tags), self.url))
            snapshot = tags[snapshot]
        found = read_snapshot(self.backend, snapshot)
        return FeatureStore(self.backend, found, self.policy, self.counters, self._pool.narrowed(found.parts))

    def tag(self, name: str, snapshot: int | None = None) -> None:
        """Give a snapshot (by default this one) a name. A tagged snapshot is never removed.

        Raises:
            StorageError: If the name is taken or is not made of letters, digits, "_", "-" and ".".
        """
        write_tag(self.backend, name, self.snapshot.id if snapshot is None else snapshot)

    def untag(self, name: str) -> None:
        """Forget a tag; the snapshot itself stays."""
        remove_tag(self.backend, name)

    def tags(self) -> dict[str, int]:
        """Tags -> number of the snapshot."""
        return list_tags(self.backend)

    # Reading

    def snapshots(self) -> list[Snapshot]:
        """All snapshots, oldest first."""
        return [read_snapshot(self.backend, number) for number in list_snapshot_ids(self.backend)]

    def refresh(self) -> FeatureStore:
        """A handle on the newest snapshot, with the same policy and counters."""
        newest = newest_snapshot(self.backend)
        return FeatureStore(
            self.backend, newest, self.policy, self.counters, self._pool.narrowed(newest.parts)
        )

    @property
    def columns(self) -> dict[str, str]:
        """Metadata columns -> SQL type."""
        own = {"row": "BIGINT", "key": "VARCHAR", "hash": "VARCHAR", "bytes": "BIGINT"}
        return own | {name: SQL_TYPES[spec.type] for name, spec in self.snapshot.columns.items()}

    @property
    def tensor_columns(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Tensor columns -> dtype and shape of one row."""
        return {name: (np.dtype(spec.dtype), spec.shape) for name, spec in self.snapshot.tensors.items()}

    def query(self, sql: str) -> pa.Table:
        """The result of one SELECT over the table `samples`.

        Raises:
            QueryError: If it is anything else, or reads anything else.
        """
        if self._samples is None:
            paths = [str(self.part(i).check_index(self.policy)) for i in range(len(self.snapshot.parts))]
            self._samples = SampleTable(self.snapshot, paths, self.row_map.deleted)
        return self._samples.run(sql)

    def select(
        self, where: str | None = None, *, order_by: str | None = None, limit: int | None = None
    ) -> View:
        """Rows that meet an SQL condition, in row order or as `order_by` says.

        Args:
            where: For example "split = 'train' and width >= 256"; None for all rows.
            order_by: For example "width desc"; rows that compare equal stay in row order.
            limit: At most so many.
        """
        if where is None and order_by is None:
            return View(self, self.row_map.live_rows()[:limit])
        sql = "SELECT row FROM samples" + (f" WHERE (\n{where}\n)" if where else "")
        if order_by is not None or limit is not None:
            sql += " ORDER BY " + (f"{order_by}\n, row" if order_by else "row")
        if limit is not None:
            sql += f" LIMIT {int(limit)}"
        rows = to_numpy(self.query(sql).column(0), np.int64)
        return View(self, rows if order_by is not None else np.sort(rows))

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

    def tensor(self, name: str) -> TensorColumn:
        """A tensor column.

        Raises:
            TensorColumnError: If there is none of this name; names the nearest.
        """
        spec = self.snapshot.tensors.get(name)
        if spec is None:
            raise TensorColumnError(
                unknown_name("tensor column", name, list(self.snapshot.tensors), self.url)
            )
        return TensorColumn(self, name, spec)

    def quarantined(self) -> pa.Table:
        """What was refused: key, place, reason, data."""
        schema = QuarantineWriter.SCHEMA
        tables = []
        for ref in self.snapshot.quarantine:
            mapped, _ = self.backend.map(ref)
            tables.append(pq.read_table(pa.BufferReader(pa.py_buffer(mapped)), schema=schema))
        return pa.concat_tables(tables) if tables else schema.empty_table()

    # Care

    def verify(self) -> VerifyReport:
        """Read everything that this snapshot lists and compare sizes, checksums and row counts."""
        return verify_store(self.backend, self.snapshot)

    def gc(self, *, grace_s: float = 3600.0, keep_last: int | None = None) -> GcReport:
        """Remove files that no snapshot lists, and with keep_last also old snapshots.

        Args:
            grace_s: Files and snapshots younger than this stay, in seconds.
            keep_last: Keep so many of the newest snapshots, and those that have a tag or that any handle on
                this machine has open; None keeps all.
        """
        return collect_garbage(self.backend, grace_s=grace_s, keep_last=keep_last)

    # For views and tensor columns

    def part(self, index: int) -> PartReader:
        """The reader of the part at a position of `snapshot.parts`."""
        reader = self._readers[index]
        if reader is None:
            reader = self._readers[index] = self._pool.get(self.snapshot.parts[index])
        return reader

    def unknown_column(self, name: str) -> str:
        """The text of an error about a metadata column that does not exist."""
        return unknown_name("column", name, list(self.columns), self.url)

    def _nearest_keys(self, key: str) -> list[str]:
        """Up to three existing keys that look like `key`, sought by SQL so that no list of keys is built."""
        literal = "'" + key.replace("'", "''").replace("\0", "") + "'"
        table = self.query(
            f"SELECT key FROM samples ORDER BY jaro_winkler_similarity(key, {literal}) DESC LIMIT 3"
        )
        return table.column(0).to_pylist()


def unknown_name(what: str, name: str, known: list[str], url: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known) or 'none'}"
    return f"{url}: there is no {what} {name!r}; {hint}"
