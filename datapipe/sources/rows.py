"""Rows of a table file, whatever its format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from datapipe.errors import SourceError
from datapipe.sources.arrow_rows import arrow_schema, read_arrow_rows
from datapipe.sources.column_kinds import ColumnKinds, kind_of_arrow
from datapipe.sources.csv_rows import csv_columns, read_csv_rows
from datapipe.sources.fields import FieldMap
from datapipe.sources.jsonl_rows import read_jsonl_rows
from datapipe.sources.parquet_rows import parquet_columns, parquet_num_rows, parquet_schema, read_parquet_rows
from datapipe.sources.record import Fault
from datapipe.sources.row import Row

__all__ = ["TABLE_SUFFIXES", "check_table", "count_rows", "observe_table", "read_rows"]

_READERS: Final = {
    ".csv": read_csv_rows,
    ".tsv": read_csv_rows,
    ".jsonl": read_jsonl_rows,
    ".ndjson": read_jsonl_rows,
    ".parquet": read_parquet_rows,
    ".arrow": read_arrow_rows,
    ".feather": read_arrow_rows,
}

TABLE_SUFFIXES: Final = frozenset(_READERS)


def check_table(path: Path, fields: FieldMap) -> None:
    """Check what the head of a table tells, before any row is read.

    Raises:
        SourceError: For an unknown format, an incomplete file, two columns of one name, or a mapped column
            that is not there.
    """
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise SourceError(f"{path}: no table format; wanted one of {', '.join(sorted(_READERS))}")
    if suffix == ".parquet":
        fields.check_columns(parquet_columns(path), str(path))
    elif suffix in (".arrow", ".feather"):
        fields.check_columns(arrow_schema(path).names, str(path))
    elif suffix in (".csv", ".tsv"):
        fields.check_columns(csv_columns(path), str(path))


def observe_table(path: Path, fields: FieldMap, kinds: ColumnKinds) -> None:
    """Show the user columns of a table: by its schema where it has one, by its values in JSON lines."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        kinds.declare(fields.pick(kind_of_arrow(parquet_schema(path))).columns, str(path))
    elif suffix in (".arrow", ".feather"):
        kinds.declare(fields.pick(kind_of_arrow(arrow_schema(path))).columns, str(path))
    elif suffix in (".csv", ".tsv"):
        kinds.declare(fields.pick(dict.fromkeys(csv_columns(path), "string")).columns, str(path))
    else:
        for row in read_rows(path):
            if isinstance(row, Row):
                kinds.observe(fields.pick(row.values).columns, row.place)


def read_rows(path: Path) -> Iterator[Row | Fault]:
    """Yield rows in the order of the file; bad ones as faults."""
    return _READERS[path.suffix.lower()](path)


def count_rows(path: Path) -> int | None:
    """Number of rows: exact for Parquet, lines (at most a few too many) for text, None for Arrow streams."""
    if path.suffix.lower() in (".arrow", ".feather"):
        return None
    if path.suffix.lower() == ".parquet":
        return parquet_num_rows(path)
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))
