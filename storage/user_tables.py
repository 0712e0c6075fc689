"""Tables of the user that a query joins with the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import QueryError

__all__ = ["UserTable", "read_table"]

_TAKEN = ("samples", "held", "deleted_rows")


class _ArrowStream(Protocol):
    """A table of pandas, polars or another library that speaks Arrow."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


UserTable = _ArrowStream | Mapping[str, Sequence[Any]] | str | Path
"""A pyarrow Table, a data frame, a mapping of columns, or the path of a Parquet or Arrow IPC file."""


def read_table(name: str, table: UserTable) -> pa.Table:
    """A table as Arrow; a path is that of a Parquet or an Arrow IPC file, whose types are kept.

    Raises:
        QueryError: If the name is one of ours, or the table cannot be read.
    """
    if not name or name.casefold() in _TAKEN or "\0" in name:
        raise QueryError(f"a table cannot be called {name!r}; use a name that is none of {', '.join(_TAKEN)}")
    if isinstance(table, str | Path):
        found = _read_file(name, Path(table))
    else:
        try:
            found = pa.table(table)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise QueryError(
                f"table {name!r}: {type(table).__name__} cannot be read as a table: {error}; give a pyarrow "
                "Table, a data frame, a mapping of columns, or the path of a Parquet or Arrow file"
            ) from None
    _check_table(name, found)
    return found


def _check_table(name: str, table: pa.Table) -> None:
    seen: dict[str, int] = {}
    for at, column in enumerate(table.column_names):
        other = seen.setdefault(column.casefold(), at)
        if other != at:
            raise QueryError(
                f"table {name!r}: columns {other + 1} and {at + 1} are both named {column!r}; rename one"
            )
    try:
        table.validate(full=True)
    except pa.ArrowException as error:
        raise QueryError(f"table {name!r} is damaged: {error}; text must be UTF-8") from None


def _read_file(name: str, path: Path) -> pa.Table:
    try:
        with path.open("rb") as file:
            is_parquet = file.read(4) == b"PAR1"
        if is_parquet:
            with pq.ParquetFile(path) as parquet:
                return parquet.read()
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_file(source).read_all()
    except (pa.ArrowException, OSError) as error:
        raise QueryError(
            f"table {name!r}: {path} cannot be read as Parquet or Arrow: {error}; for CSV and JSON, read the "
            "file with types of your choice and give the table"
        ) from None
