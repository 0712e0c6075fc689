"""Parquet in small batches, so that memory does not follow the size of the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from datapipe.errors import SourceError
from datapipe.sources.arrow_rows import rows_of_batch
from datapipe.sources.record import Fault
from datapipe.sources.row import Row, check_unique_names

__all__ = ["parquet_columns", "parquet_num_rows", "parquet_schema", "read_parquet_rows"]

_BATCH_ROWS: Final = 64


def parquet_columns(path: Path) -> list[str]:
    """Names of the top-level columns.

    Raises:
        SourceError: If the file has no valid footer, or two columns of one name.
    """
    with _open(path) as file:
        names: list[str] = file.schema_arrow.names
    check_unique_names(names, str(path))
    return names


def parquet_schema(path: Path) -> pa.Schema:
    """Arrow schema of the file."""
    with _open(path) as file:
        return file.schema_arrow


def parquet_num_rows(path: Path) -> int:
    """Number of rows from the footer."""
    with _open(path) as file:
        return int(file.metadata.num_rows)


def read_parquet_rows(path: Path) -> Iterator[Row | Fault]:
    """Yield every row; a row with text that is not UTF-8 becomes a fault.

    Raises:
        SourceError: See parquet_columns.
    """
    parquet_columns(path)
    number = 0
    with _open(path) as file:
        try:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                yield from rows_of_batch(batch, path, number)
                number += len(batch)
        except (pa.ArrowException, OSError) as error:
            detail = f"reading stopped after row {number} of {file.metadata.num_rows}: {error}"
            yield Fault(key="", place=f"{path.name}#{number + 1}", reason="bad_parquet", detail=detail)


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{path}: not a complete Parquet file ({error}); write it again") from error
