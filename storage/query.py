"""SQL over the index: DuckDB reads the Parquet parts, and may read nothing else."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from storage.arrow_numpy import from_numpy
from storage.columns import SQL_TYPES
from storage.errors import QueryError
from storage.manifest import Snapshot

__all__ = ["SampleTable", "quote"]


def quote(name: str) -> str:
    """A column name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


# Text may exceed 2 GiB in one result, and a table name must not reach the Python variables of the caller.
_SETTINGS: dict[str, Any] = {"arrow_large_buffer_size": True, "python_enable_replacements": False}
_MANY_PARTS = 16
_MAX_TABLE_ROWS = 1 << 18
_tables: weakref.WeakSet[SampleTable] = weakref.WeakSet()
_inherited: list[duckdb.DuckDBPyConnection] = []


class SampleTable:
    """The table `samples` of one snapshot: row, key, hash, bytes and the user's columns.

    Connections belong to one process; after a fork the child makes its own.
    """

    def __init__(self, snapshot: Snapshot, paths: Sequence[str], deleted: np.ndarray) -> None:
        self._snapshot = snapshot
        self._paths = list(paths)
        self._deleted = deleted
        self._connection: duckdb.DuckDBPyConnection | None = None
        _tables.add(self)
        self._lock = threading.Lock()

    def run(self, sql: str) -> pa.Table:
        """The result of one SELECT.

        Raises:
            QueryError: If it is not exactly one SELECT, if it reads anything but `samples`, or if DuckDB
                refuses it.
        """
        try:
            kinds = [statement.type for statement in duckdb.extract_statements(sql)]
            if kinds != [duckdb.StatementType.SELECT]:
                raise QueryError(f"the query is not one SELECT over samples: {sql.strip()[:200]!r}")
            return self._cursor().sql(sql).to_arrow_table()
        except duckdb.Error as error:
            raise QueryError(
                f"the query failed: {error}; columns: {', '.join(self._snapshot.columns)}"
            ) from None

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        with self._lock:
            if self._connection is None:
                self._connection = self._connect()
            return self._connection.cursor()

    def forget_connection(self) -> None:
        """Begin anew in a forked child.

        The parent's connection is never freed here: that would wait for threads that no fork copies.
        """
        if self._connection is not None:
            _inherited.append(self._connection)
        self._connection = None
        self._lock = threading.Lock()

    def _connect(self) -> duckdb.DuckDBPyConnection:
        connection = duckdb.connect(":memory:", config=_SETTINGS)
        if len(self._deleted):
            connection.register("arrow_deleted", pa.table({"row": from_numpy(self._deleted)}))
            connection.execute("CREATE TABLE deleted_rows AS SELECT row FROM arrow_deleted")
            connection.unregister("arrow_deleted")
        try:
            connection.execute(self._view_sql(set()))
        except duckdb.BinderException:
            # A column may be in the schema only: every part that had it is gone, or no row was given a value.
            described = connection.execute(f"DESCRIBE SELECT * FROM {_parquet(self._paths)}").fetchall()
            connection.execute(self._view_sql(set(self._snapshot.columns) - {name for name, *_ in described}))
        # The parts may be read and nothing else; run() lets only SELECT pass, so nothing can be written.
        connection.execute(f"SET allowed_paths = {_list(self._paths)}")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        return connection

    def _view_sql(self, absent: set[str]) -> str:
        """The view over the parts; `absent` columns are in no part."""
        parts = self._snapshot.parts
        columns = ['"key"', '"hash"', '"bytes"']
        for name, spec in self._snapshot.columns.items():
            null = f"CAST(NULL AS {SQL_TYPES[spec.type]}) AS {quote(name)}"
            columns.append(null if spec.type == "null" or name in absent else quote(name))
        if not parts:
            types = [("row", "BIGINT"), ("key", "VARCHAR"), ("hash", "VARCHAR"), ("bytes", "BIGINT")]
            types += [(name, SQL_TYPES[spec.type]) for name, spec in self._snapshot.columns.items()]
            nulls = ", ".join(f"CAST(NULL AS {kind}) AS {quote(name)}" for name, kind in types)
            return f"CREATE VIEW samples AS SELECT {nulls} WHERE false"
        sql = f"SELECT {self._row_sql()} AS row, {', '.join(columns)} FROM {_parquet(self._paths)}"
        if len(self._deleted):
            sql = f"SELECT * FROM ({sql}) ANTI JOIN deleted_rows USING (row)"
        return f"CREATE {self._kind()} samples AS {sql}"

    def _kind(self) -> str:
        """Many small files take longer to open than to hold: they are read into a table once."""
        parts = self._snapshot.parts
        is_small = sum(part.rows for part in parts) <= _MAX_TABLE_ROWS
        return "TABLE" if len(parts) > _MANY_PARTS and is_small else "VIEW"

    def _row_sql(self) -> str:
        """The number of a row: from the file of a compacted part, else by its place in the file."""
        parts = self._snapshot.parts
        firsts = [part.first_row for part in parts]
        first = str(firsts[0]) if len(parts) == 1 else f"{firsts}[file_index::BIGINT + 1]"
        counted = f"{first}::BIGINT + file_row_number"
        stored = [part.row_ids is not None for part in parts]
        return '"row"' if all(stored) else f'coalesce("row", {counted})' if any(stored) else counted


def _parquet(paths: Sequence[str]) -> str:
    return f"read_parquet({_list(paths)}, union_by_name = true)"


def _list(paths: Sequence[str]) -> str:
    return "[" + ", ".join("'" + path.replace("'", "''") + "'" for path in paths) + "]"


def _after_fork_in_child() -> None:
    for table in _tables:
        table.forget_connection()


os.register_at_fork(after_in_child=_after_fork_in_child)
