"""SQL over the index: DuckDB reads the Parquet parts, and may read nothing else."""

from __future__ import annotations

import difflib
import os
import re
import secrets
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from storage.arrow_numpy import from_numpy
from storage.columns import SQL_TYPES
from storage.errors import QueryError
from storage.manifest import Snapshot
from storage.user_tables import UserTable, read_table

if TYPE_CHECKING:
    import duckdb

__all__ = ["SampleTable", "quote"]


def quote(name: str) -> str:
    """A column name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


# Text may exceed 2 GiB in one result, and a table name must not reach the Python variables of the caller.
# What a query holds beyond the limit, such as the runs of a sort, goes to files that it removes again.
_SETTINGS: dict[str, Any] = {
    "arrow_large_buffer_size": True,
    "python_enable_replacements": False,
    "memory_limit": "1GB",
}
_UNKNOWN_COLUMN = re.compile(r'Referenced column "([^"]+)" not found')
_MANY_PARTS = 16
_MAX_TABLE_ROWS = 1 << 18
_MAX_TABLE_BYTES = 1 << 24
"""Of Parquet files, which take several times as much in memory."""
_VIEW_RUNS = 2
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
        self._num_runs = 0
        _tables.add(self)
        self._lock = threading.Lock()

    def run(self, sql: str, tables: Mapping[str, UserTable] | None = None) -> pa.Table:
        """The result of one SELECT.

        Raises:
            QueryError: If it is not exactly one SELECT, if it reads anything but `samples` and `tables`, or
                if DuckDB refuses it.
        """
        import duckdb

        others = {name: read_table(name, table) for name, table in (tables or {}).items()}
        try:
            kinds = [statement.type for statement in duckdb.extract_statements(sql)]
            if kinds != [duckdb.StatementType.SELECT]:
                raise QueryError(f"the query is not one SELECT over samples: {sql.strip()[:200]!r}")
            with self._cursor() as cursor:
                for name, table in others.items():
                    cursor.register(name, table)
                return cursor.sql(sql).to_arrow_table()
        except duckdb.Error as error:
            raise QueryError(self._failure(str(error))) from None

    def _failure(self, said: str) -> str:
        """What DuckDB says, in one line, with the nearest column where one is not known."""
        columns = ["row", "key", "hash", "bytes", *self._snapshot.columns]
        unknown = _UNKNOWN_COLUMN.search(said)
        reason = said.partition("\n")[0]
        if unknown is not None:
            near = difflib.get_close_matches(unknown[1].lower(), columns, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            reason = f"there is no column {unknown[1]!r}{hint}"
        return f"the query failed: {reason}; columns: {', '.join(self._snapshot.columns)}"

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        """A cursor; what is registered on it is seen by no other."""
        with self._lock:
            if self._connection is None:
                self._connection = self._connect()
            if self._num_runs == _VIEW_RUNS and self._is_worth_a_table():
                self._connection.execute("CREATE TABLE held AS SELECT * FROM samples")
                self._connection.execute("CREATE OR REPLACE VIEW samples AS SELECT * FROM held")
            self._num_runs += 1
            return self._connection.cursor()

    def _is_worth_a_table(self) -> bool:
        """Many small files take longer to open than to hold: after a few queries they are read once."""
        parts = self._snapshot.parts
        return (
            len(parts) > _MANY_PARTS
            and sum(part.rows for part in parts) <= _MAX_TABLE_ROWS
            and sum(part.index.bytes for part in parts) <= _MAX_TABLE_BYTES
        )

    def forget_connection(self) -> None:
        """Begin anew in a forked child.

        The parent's connection is never freed here: that would wait for threads that no fork copies.
        """
        if self._connection is not None:
            _inherited.append(self._connection)
        self._connection = None
        self._lock = threading.Lock()

    def _connect(self) -> duckdb.DuckDBPyConnection:
        import duckdb

        # DuckDB makes and removes this folder; two connections must not share it.
        spill = Path(tempfile.gettempdir()) / f"unirl-query-{secrets.token_hex(8)}"
        connection = duckdb.connect(":memory:", config={**_SETTINGS, "temp_directory": str(spill)})
        if len(self._deleted):
            connection.register("arrow_deleted", pa.table({"row": from_numpy(self._deleted)}))
            connection.execute("CREATE TABLE deleted_rows AS SELECT row FROM arrow_deleted")
            connection.unregister("arrow_deleted")
        connection.execute(self._view_sql())
        # The parts may be read and nothing else; run() lets only SELECT pass, so nothing can be written.
        connection.execute(f"SET allowed_paths = {_list(self._paths)}")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        return connection

    def _view_sql(self) -> str:
        columns = {"key": "VARCHAR", "hash": "VARCHAR", "bytes": "BIGINT"}
        columns |= {name: SQL_TYPES[spec.type] for name, spec in self._snapshot.columns.items()}
        if not self._snapshot.parts:
            nulls = [f"CAST(NULL AS {kind}) AS {quote(name)}" for name, kind in columns.items()]
            nulls = ["CAST(NULL AS BIGINT) AS row", *nulls]
            return f"CREATE VIEW samples AS SELECT {', '.join(nulls)} WHERE false"
        stored = columns | ({"row": "BIGINT"} if self._has_stored_rows() else {})
        sql = (
            f"SELECT {self._row_sql()} AS row, {', '.join(map(quote, columns))} "
            f"FROM read_parquet({_list(self._paths)}, schema = {_schema(stored)}, hive_partitioning = false)"
        )
        if len(self._deleted):
            sql = f"SELECT * FROM ({sql}) ANTI JOIN deleted_rows USING (row)"
        return f"CREATE VIEW samples AS {sql}"

    def _has_stored_rows(self) -> bool:
        return any(part.row_ids is not None for part in self._snapshot.parts)

    def _row_sql(self) -> str:
        """The number of a row: from the file of a compacted part, else by its place in the file."""
        parts = self._snapshot.parts
        firsts = [part.first_row for part in parts]
        first = str(firsts[0]) if len(parts) == 1 else f"{firsts}[file_index::BIGINT + 1]"
        counted = f"{first}::BIGINT + file_row_number"
        stored = [part.row_ids is not None for part in parts]
        return '"row"' if all(stored) else f'coalesce("row", {counted})' if any(stored) else counted


def _schema(columns: Mapping[str, str]) -> str:
    """The columns for read_parquet, which then opens no file early; a part that lacks one has nulls."""
    entries = [
        f"{_text(name)}: {{name: {_text(name)}, type: '{kind}', default_value: NULL}}"
        for name, kind in columns.items()
    ]
    return "MAP {" + ", ".join(entries) + "}"


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _list(paths: Sequence[str]) -> str:
    return "[" + ", ".join(map(_text, paths)) + "]"


def _after_fork_in_child() -> None:
    for table in _tables:
        table.forget_connection()


os.register_at_fork(after_in_child=_after_fork_in_child)
