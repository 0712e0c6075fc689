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
        return _read_file(name, Path(table))
    try:
        return pa.table(table)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise QueryError(
            f"table {name!r}: {type(table).__name__} cannot be read as a table: {error}; give a pyarrow "
            "Table, a data frame, a mapping of columns, or the path of a Parquet or Arrow file"
        ) from None


def _read_file(name: str, path: Path) -> pa.Table:
    try:
        with path.open("rb") as file:
            is_parquet = file.read(4) == b"PAR1"
        if is_parquet:
            return pq.read_table(path)
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_file(source).read_all()
    except (pa.ArrowException, OSError) as error:
        raise QueryError(
            f"table {name!r}: {path} cannot be read as Parquet or Arrow: {error}; for CSV and JSON, read the "
            "file with types of your choice and give the table"
        ) from None
