"""Rows of a table file, whatever its format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Final

import pyarrow as pa

from datapipe.errors import DecodeError, SourceError
from datapipe.sources.arrange import arrange
from datapipe.sources.arrow_rows import Batch, arrow_schema, read_arrow_batches, read_arrow_rows
from datapipe.sources.column_kinds import ColumnKinds, kind_of_arrow
from datapipe.sources.compression import open_plain, strip_compression
from datapipe.sources.csv_rows import csv_columns, read_csv_rows
from datapipe.sources.fields import FieldMap
from datapipe.sources.json_rows import read_json_rows
from datapipe.sources.jsonl_rows import read_jsonl_rows
from datapipe.sources.parquet_rows import (
    parquet_num_rows,
    parquet_schema,
    read_parquet_batches,
    read_parquet_rows,
)
from datapipe.sources.prompt_lines import read_prompt_lines
from datapipe.sources.record import Fault, Note
from datapipe.sources.remote import SourcePath
from datapipe.sources.row import Row

__all__ = [
    "TABLE_SUFFIXES",
    "check_table",
    "count_rows",
    "is_table",
    "observe_table",
    "read_batches",
    "read_rows",
    "table_columns",
    "table_schema",
]

_READERS: Final[dict[str, Callable[[SourcePath], Iterator[Row | Fault | Note]]]] = {
    ".csv": read_csv_rows,
    ".tsv": read_csv_rows,
    ".jsonl": read_jsonl_rows,
    ".ndjson": read_jsonl_rows,
    ".json": read_json_rows,
    ".txt": read_prompt_lines,
    ".parquet": read_parquet_rows,
    ".arrow": read_arrow_rows,
    ".feather": read_arrow_rows,
}
_BATCH_READERS: Final = {
    ".parquet": read_parquet_batches,
    ".arrow": read_arrow_batches,
    ".feather": read_arrow_batches,
}
_SCHEMAS: Final = {".parquet": parquet_schema, ".arrow": arrow_schema, ".feather": arrow_schema}

TABLE_SUFFIXES: Final = frozenset(_READERS)


def is_table(name: str) -> bool:
    """Whether the file name is that of a table; .csv.gz and its like count, .parquet.gz does not."""
    return _suffix(name) in _READERS


def table_schema(path: SourcePath) -> pa.Schema | None:
    """The Arrow schema of a file that has one.

    Raises:
        SourceError: For an incomplete file, and for two columns of one name.
    """
    read = _SCHEMAS.get(_known_suffix(path))
    return None if read is None else read(path)


def table_columns(path: SourcePath) -> list[str] | None:
    """The columns that the head of the file tells; None where each row has its own.

    Raises:
        SourceError: For an unknown format, an incomplete file, or two columns of one name.
    """
    schema = table_schema(path)
    if schema is not None:
        return list(schema.names)
    return csv_columns(path) if _known_suffix(path) in (".csv", ".tsv") else None


def check_table(path: SourcePath, fields: FieldMap) -> None:
    """Check what the head of a table tells, before any row is read.

    Raises:
        SourceError: For an unknown format, an incomplete file, two columns of one name, or a mapped column
            that is not there.
    """
    columns = table_columns(path)
    if columns is not None:
        fields.check_columns(columns, str(path))


def observe_table(path: SourcePath, fields: FieldMap, kinds: ColumnKinds) -> None:
    """Show the user columns of a table: by its schema where it has one, by its values in JSON lines.

    Raises:
        SourceError: When no row has a column that is mapped to key, picture, caption or messages.
    """
    schema = table_schema(path)
    if schema is not None:
        declared = kind_of_arrow(schema)
        wanted = fields.user_columns(schema.names)
        kinds.declare({our: declared[their] for our, their in wanted.items() if their in declared}, str(path))
        return
    columns = table_columns(path)
    if columns is not None:
        kinds.declare(dict.fromkeys(fields.user_columns(columns), "string"), str(path))
        return
    unseen = fields.unseen()
    for row in read_rows(path):
        if isinstance(row, Row):
            unseen.look(row.values)
            try:
                own = arrange(row.values, fields).columns
            except DecodeError:
                continue  # reported when the sample is read
            except SourceError as error:
                raise SourceError(f"{row.place}: {error}") from None
            kinds.observe(own, row.place)
    unseen.refuse(str(path))


def read_rows(path: SourcePath) -> Iterator[Row | Fault | Note]:
    """Yield rows in the order of the file; bad ones as faults."""
    return _READERS[_known_suffix(path)](path)


def read_batches(path: SourcePath) -> Iterator[Batch | Fault] | None:
    """Yield rows in Arrow batches, for the formats that are made of them."""
    read = _BATCH_READERS.get(_known_suffix(path))
    return None if read is None else read(path)


def count_rows(path: SourcePath) -> int | None:
    """Number of rows: exact for Parquet, lines (at most a few too many) for text files here, else None."""
    suffix = _known_suffix(path)
    if suffix == ".parquet":
        return parquet_num_rows(path)
    if suffix in (".arrow", ".feather", ".json") or not hasattr(path, "stat"):
        return None
    with open_plain(path) as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))


def _suffix(name: str) -> str:
    plain = strip_compression(name)
    suffix = PurePosixPath(plain).suffix.lower()
    return "" if plain != name and suffix in _BATCH_READERS else suffix


def _known_suffix(path: SourcePath) -> str:
    suffix = _suffix(path.name)
    if suffix not in _READERS:
        raise SourceError(
            f"{path}: no table format; wanted one of {', '.join(sorted(_READERS))}; the text formats may be "
            f"packed with gz, bz2, xz or zst"
        )
    return suffix
