"""Parquet in small batches, so that memory does not follow the size of the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from datapipe.errors import SourceError
from datapipe.sources.arrow_rows import Batch, check_batch, rows_of_batches
from datapipe.sources.compression import open_binary
from datapipe.sources.record import Fault
from datapipe.sources.remote import SourcePath
from datapipe.sources.row import Row, check_unique_names

__all__ = ["parquet_num_rows", "parquet_schema", "read_parquet_batches", "read_parquet_rows"]

_BATCH_BYTES: Final = 8 * 2**20
_MIN_BATCH_ROWS: Final = 16
_MAX_BATCH_ROWS: Final = 4096


def parquet_schema(path: SourcePath) -> pa.Schema:
    """Arrow schema of the file.

    Raises:
        SourceError: If the file has no valid footer, or two columns of one name.
    """
    with _open(path) as file:
        schema: pa.Schema = file.schema_arrow
    check_unique_names(schema.names, str(path))
    return schema


def parquet_num_rows(path: SourcePath) -> int:
    """Number of rows from the footer."""
    with _open(path) as file:
        return int(file.metadata.num_rows)


def read_parquet_rows(path: SourcePath) -> Iterator[Row | Fault]:
    """Yield every row; a row with text that is not UTF-8 becomes a fault.

    Raises:
        SourceError: See parquet_schema.
    """
    yield from rows_of_batches(read_parquet_batches(path), path)


def read_parquet_batches(path: SourcePath) -> Iterator[Batch | Fault]:
    """Yield the rows in batches of up to 4096, fewer where rows are long.

    A row group that cannot be read is one fault; the next one is read all the same.

    Raises:
        SourceError: See parquet_schema.
    """
    parquet_schema(path)
    with _open(path) as file:
        start = 0
        for group in range(file.num_row_groups):
            found = file.metadata.row_group(group)
            size = _batch_rows(found.total_byte_size, found.num_rows)
            number = start
            try:
                for batch in file.iter_batches(batch_size=size, row_groups=[group]):
                    check_batch(batch)
                    yield Batch(number=number, batch=batch)
                    number += len(batch)
            except (pa.ArrowException, OSError, ValueError) as error:
                detail = (
                    f"reading stopped after row {number} of {file.metadata.num_rows}, "
                    f"{start + found.num_rows - number} rows of row group {group} are lost: {error}"
                )
                yield Fault(key="", place=f"{path.name}#{number + 1}", reason="bad_parquet", detail=detail)
            start += found.num_rows


def _batch_rows(num_bytes: int, num_rows: int) -> int:
    wanted = _BATCH_BYTES * max(num_rows, 1) // max(num_bytes, 1)
    return min(max(wanted, _MIN_BATCH_ROWS), _MAX_BATCH_ROWS)


@contextmanager
def _open(path: SourcePath) -> Iterator[pq.ParquetFile]:
    try:
        file = open_binary(path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be opened ({error})") from error
    with file:
        try:
            parquet = pq.ParquetFile(file)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{path}: not a complete Parquet file ({error}); write it again") from error
        yield parquet
