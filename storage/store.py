"""The feature store: rows with a key, metadata, encoded bytes and tensors, in immutable snapshots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from storage.arrow_numpy import to_numpy
from storage.backends import Backend, find_backend
from storage.care import Care
from storage.column import TensorColumn
from storage.errors import ColumnError, QueryError, TensorColumnError
from storage.handle import unknown_name
from storage.manifest import ModelRecord, Snapshot
from storage.reading import Reading
from storage.snapshots import create_store, hold_newest, list_snapshot_ids, newest_snapshot, read_snapshot
from storage.tensors import tensor_spec
from storage.user_tables import UserTable
from storage.versions import Versions
from storage.view import View
from storage.writing import Writing

if TYPE_CHECKING:
    from storage.exchange import ExportReport
    from storage.feature_values import Values

__all__ = ["FeatureStore"]


class FeatureStore(Reading, Versions, Writing, Care):
    """One snapshot of a store, opened for reading; writers publish new snapshots beside it.

    A handle never changes what it shows: after a commit, `refresh()` gives a handle on the newest snapshot.
    It can be pickled and used after a fork, and may be read from several threads.
    """

    @classmethod
    def create(
        cls, path: str | Path | Backend, exist_ok: bool = False, *, allow_network_fs: bool | None = None
    ) -> FeatureStore:
        """Make an empty store, with its folders; with exist_ok an existing one is opened.

        Args:
            path: Folder of the store, or the backend that knows where it lies.
            exist_ok: Open the store that there may be already.
            allow_network_fs: As for `open`.

        Raises:
            StoreExistsError: If there is a store (and not exist_ok), or a folder with other files.
            StorageError: If the folder cannot be written to, or is on a network file system.
        """
        backend = find_backend(path, allow_network_fs=allow_network_fs)
        if exist_ok and list_snapshot_ids(backend):
            return cls.open(backend)
        return cls(backend, create_store(backend), "first-read")

    @classmethod
    def open(
        cls,
        path: str | Path | Backend,
        snapshot: int | None = None,
        verify: str = "first-read",
        *,
        allow_network_fs: bool | None = None,
    ) -> FeatureStore:
        """Open the newest snapshot, or the given one.

        Args:
            path: Folder of the store, or the backend that knows where it lies.
            snapshot: Number of a snapshot.
            verify: Compare checksums when data is read for the first time in this process ("first-read"),
                every time ("always"), or not ("never"). Sizes are always compared.
            allow_network_fs: Let commits be made although the folder is on a network file system. None asks
                the environment variable UNIRL_ALLOW_NETWORK_FS. Reading needs no permission.

        Raises:
            StoreNotFoundError: If the path holds no store; names the nearest one.
            SnapshotNotFoundError, ManifestError, FormatVersionError: If the snapshot cannot be used.
        """
        backend = find_backend(path, allow_network_fs=allow_network_fs)
        if snapshot is not None:
            return cls(backend, read_snapshot(backend, snapshot), verify)
        newest, lease = hold_newest(backend)
        store = cls(backend, newest, verify)
        del lease
        return store

    def __reduce__(self) -> tuple[Any, ...]:
        return FeatureStore.open, (self.backend, self.snapshot.id, self.policy)

    def select(
        self,
        where: str | None = None,
        *,
        order_by: str | None = None,
        limit: int | None = None,
        tables: Mapping[str, UserTable] | None = None,
    ) -> View:
        """Rows that meet an SQL condition, in row order or as `order_by` says.

        Args:
            where: For example "split = 'train' and width >= 256"; None for all rows.
            order_by: For example "width desc"; rows that compare equal stay in row order.
            limit: At most so many.
            tables: Tables of yours by name, as for `query`: "key IN (SELECT key FROM mine)".
        """
        _check_limit(limit)
        if where is None and order_by is None:
            return View(self, self.row_map.live_rows()[:limit])
        sql = "SELECT row FROM samples" + (f" WHERE (\n{where}\n)" if where else "")
        if order_by is not None or limit is not None:
            sql += " ORDER BY " + (f"{order_by}\n, row" if order_by else "row")
        if limit is not None:
            sql += f" LIMIT {int(limit)}"
        rows = to_numpy(self.query(sql, tables=tables).column(0), np.int64)
        return View(self, rows if order_by is not None else np.sort(rows))

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

    def search(self, text: str, *, column: str = "caption", limit: int = 100) -> View:
        """Rows whose text has some of the words, best first by BM25; rows without text are not found.

        Words are compared whole, without regard to case and Unicode form; in scripts without spaces between
        words a run of letters is sought as it stands. Nothing is kept up for it: a search reads the column.
        A million captions of 45 letters, of which a quarter has one of the words, took 0.8 s of processor
        time.

        Args:
            text: For example "red circle".
            column: A text column.
            limit: At most so many.

        Raises:
            ColumnError: If there is no such column, or it does not hold text.
            QueryError: If there is no word in `text`, or the limit is negative.
        """
        _check_limit(limit)
        if self.columns.get(column) != "VARCHAR":
            kind = self.columns.get(column)
            raise ColumnError(
                self.unknown_column(column)
                if kind is None
                else f"{self.url}: column {column!r} is {kind}; search a text column"
            )
        from storage.search import search_rows

        return View(self, search_rows(self.query, column, text, limit))

    # Writing

    def add_column(
        self,
        name: str,
        values: Values,
        *,
        dtype: np.typing.DTypeLike,
        shape: Sequence[int],
        message: str = "",
        sparse: bool = False,
        model: str | None = None,
        model_hash: str | None = None,
        workers: int | Executor = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> Snapshot:
        """Write a tensor column beside the rows of the newest snapshot that have no value yet.

        A function is called on about a thousand rows at a time, and its values are kept in a staging folder.
        When the run is killed or the function fails, a run with the same arguments (name, dtype, shape,
        model, sparse, and the code of the function) computes only the rest. `gc` removes what was kept once
        it is an hour old. Numbers and texts that a function closes over are compared, a model is not: give
        `model_hash` when weights may change.

        Args:
            name: Letters, digits, "_", "-" and ".".
            values: (key, array) pairs in any order, or a function from a View of n rows to an array
                (n, *shape), or with sparse to a pair (has, array): bool (n,) and (has.sum(), *shape).
            dtype: numpy dtype: bool, integer or float.
            shape: Of one row.
            sparse: Let rows stay without a value; later calls may give one to more rows.
            model, model_hash: What computed the values, kept in the snapshot. All calls for one column say
                the same.
            workers: Threads that call the function, or an executor; the result does not depend on it. A pool
                of processes needs a function that can be pickled.
            progress: Called with the rows done and the rows there are, after each chunk.

        Raises:
            TensorColumnError: If a row gets no value (and not sparse), a value does not fit, every row has a
                value already, or the column is by another model.
            CommitConflictError: If another writer wrote the same column meanwhile, or is doing so now.
        """
        from storage.features import ColumnRequest, add_tensor_column

        record = None if model is None else ModelRecord(name=model, hash=model_hash)
        request = ColumnRequest(
            name=name,
            spec=replace(tensor_spec(name, dtype, tuple(shape)), model=record),
            message=message or f"add column {name}",
            sparse=sparse,
            workers=workers,
            progress=progress,
        )
        return add_tensor_column(self._newest(), values, request)

    def _newest(self) -> FeatureStore:
        """This handle when it is on the newest snapshot, else one that is."""
        return self if newest_snapshot(self.backend).id == self.snapshot.id else self.refresh()

    def delete(self, rows: str | View, message: str = "") -> Snapshot:
        """Publish a snapshot without some rows: those that meet an SQL condition now, or those of a view.

        Earlier snapshots keep them. Their keys may be used again, their numbers never are.
        """
        from storage.deletion import delete_rows

        view = self._newest().select(rows) if isinstance(rows, str) else rows
        return delete_rows(self._pool, view.rows, message or f"delete {len(view)} rows")

    # Exchange

    def export(
        self,
        rows: str | View | None,
        path: str | Path,
        format: str,
        *,
        file_bytes: int = 1 << 30,
        progress: Callable[[int, int], None] | None = None,
    ) -> ExportReport:
        """Write rows of this snapshot into a new folder, for other programs and for `import_rows`.

        Args:
            rows: An SQL condition, a view, or None for all rows.
            path: Where the folder shall be. It appears when it is whole.
            format: "webdataset" (tars), "parquet", or "hf" (what `datasets.load_from_disk` reads).
            file_bytes: About the size of a file.
            progress: Is called with the rows done and to do.

        Raises:
            StorageError: If the path exists, or the format is not known.
            CorruptionError: If a shard is damaged.
        """
        from storage.exchange import export_rows

        view = self.select(rows) if rows is None or isinstance(rows, str) else rows
        return export_rows(view, Path(path), format, file_bytes=file_bytes, progress=progress)

    def import_rows(
        self,
        path: str | Path,
        *,
        message: str = "",
        part_bytes: int = 1 << 30,
        progress: Callable[[int, int], None] | None = None,
    ) -> Snapshot:
        """Commit the rows of a folder that `export` wrote: the same keys, blobs, metadata and tensors.

        Args:
            path: The folder.
            message: Kept in the snapshot.
            part_bytes: About the size of a part.
            progress: Is called with the rows done and to do.

        Raises:
            StorageError: If the folder is no export.
            CorruptionError: If it is damaged.
            DuplicateKeyError, ColumnTypeError, TensorColumnError: If its rows do not fit the store.
        """
        from storage.exchange import import_rows

        text = message or f"import {Path(path).name}"
        return import_rows(self._pool, Path(path), message=text, part_bytes=part_bytes, progress=progress)


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 0:
        raise QueryError(f"a limit of {limit} rows is negative; give None for all rows")
