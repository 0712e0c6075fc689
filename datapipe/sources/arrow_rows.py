"""Arrow files, in the stream or the file format, as `datasets` and Feather write them, in small batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from datapipe.errors import SourceError
from datapipe.sources.record import Fault
from datapipe.sources.remote import SourcePath
from datapipe.sources.row import Row, check_unique_names

__all__ = [
    "Batch",
    "arrow_schema",
    "check_batch",
    "read_arrow_batches",
    "read_arrow_rows",
    "rows_of_batch",
    "rows_of_batches",
]

_BATCH_BYTES: Final = 8 * 2**20
_MAX_BATCH_ROWS: Final = 4096
_FILE_MAGIC: Final = b"ARROW1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Consecutive rows of a file."""

    number: int  # rows of the file before the first
    batch: pa.RecordBatch


def arrow_schema(path: SourcePath) -> pa.Schema:
    """Schema of the file.

    Raises:
        SourceError: If it is no Arrow file, or has two columns of one name.
    """
    with _open(path) as (schema, _):
        check_unique_names(schema.names, str(path))
        return schema


def read_arrow_rows(path: SourcePath) -> Iterator[Row | Fault]:
    """Yield every row; a row with text that is not UTF-8 becomes a fault.

    Raises:
        SourceError: See arrow_schema.
    """
    yield from rows_of_batches(read_arrow_batches(path), path)


def read_arrow_batches(path: SourcePath) -> Iterator[Batch | Fault]:
    """Yield the rows in batches of up to 4096, fewer where rows are long.

    Raises:
        SourceError: See arrow_schema.
    """
    arrow_schema(path)
    number = 0
    with _open(path) as (_, batches):
        try:
            for batch in batches:
                check_batch(batch)
                size = min(max(_BATCH_BYTES * len(batch) // max(batch.nbytes, 1), 1), _MAX_BATCH_ROWS)
                for start in range(0, len(batch), size):
                    piece = batch.slice(start, size)
                    yield Batch(number=number, batch=piece)
                    number += len(piece)
        except (pa.ArrowException, OSError, ValueError) as error:
            detail = f"reading stopped after row {number}: {error}"
            yield Fault(key="", place=f"{path.name}#{number + 1}", reason="bad_arrow", detail=detail)


@contextmanager
def _open(path: SourcePath) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    with ExitStack() as stack:
        try:
            source = stack.enter_context(_source(path))
            is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
            source.seek(0)
            if is_file:
                reader = pa.ipc.open_file(source)
                schema = reader.schema
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            else:
                stream = pa.ipc.open_stream(source)
                schema, batches = stream.schema, iter(stream)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{path}: not a complete Arrow file ({error}); write it again") from error
        yield schema, batches


def _source(path: SourcePath) -> pa.NativeFile:
    return pa.memory_map(str(path)) if isinstance(path, Path) else pa.PythonFile(path.open(), mode="r")


def check_batch(batch: pa.RecordBatch) -> None:
    """Refuse a batch in which offsets or lengths point outside of its buffers; pyarrow trusts the file.

    Raises:
        pyarrow.ArrowInvalid: For such a batch.
    """
    for column in batch.columns:
        _check_memory(column)


def rows_of_batches(batches: Iterator[Batch | Fault], path: SourcePath) -> Iterator[Row | Fault]:
    """The rows of all batches; faults among the batches are passed on."""
    for batch in batches:
        if isinstance(batch, Fault):
            yield batch
        else:
            yield from rows_of_batch(batch.batch, path, batch.number)


def rows_of_batch(batch: pa.RecordBatch, path: SourcePath, number: int) -> Iterator[Row | Fault]:
    """Rows of a checked batch that begins after row `number` of its file."""
    names: list[str] = batch.schema.names
    cells = [_cells(column) for column in batch.columns]
    for offset, values in enumerate(zip(*cells), start=1):
        yield _row(path, number + offset, names, values)


def _check_memory(column: pa.Array) -> None:
    """Refuse an array whose values would be read outside of its buffers: pyarrow trusts what a file says.

    Text is checked as bytes here, so that one value that is not UTF-8 costs its row and not the batch.
    """
    if pa.types.is_dictionary(column.type):
        _check_memory(column.indices)
        _check_memory(column.dictionary)
    elif pa.types.is_struct(column.type):
        column.validate()
        for index in range(column.type.num_fields):
            _check_memory(column.field(index))
    elif pa.types.is_string(column.type):
        column.view(pa.binary()).validate(full=True)
    elif pa.types.is_large_string(column.type):
        column.view(pa.large_binary()).validate(full=True)
    else:
        column.validate(full=True)


def _cells(column: pa.Array) -> list[object]:
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_cell(scalar) for scalar in column]
    except (ValueError, OverflowError):
        # Nanoseconds, and years that Python's dates do not reach.
        return _as_texts(column)


def _as_texts(column: pa.Array) -> list[object]:
    try:
        return list(column.cast(pa.string()).to_pylist())
    except pa.ArrowException:
        if not pa.types.is_timestamp(column.type):
            raise
        # A time zone that nobody knows; what is stored is UTC.
        texts = column.cast(pa.timestamp(column.type.unit)).cast(pa.string()).to_pylist()
        return [text and f"{text}Z" for text in texts]


def _cell(scalar: pa.Scalar) -> object:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error


def _row(path: SourcePath, number: int, columns: list[str], values: tuple[object, ...]) -> Row | Fault:
    place = f"{path.name}#{number}"
    for name, value in zip(columns, values):
        if isinstance(value, UnicodeDecodeError):
            byte = value.object[value.start]
            detail = f"column {name!r} holds byte 0x{byte:02x} at position {value.start}, which is not UTF-8"
            return Fault(
                key="", place=place, reason="not_utf8", detail=detail, data=bytes(value.object[:65536])
            )
    return Row(place=place, number=number, values=dict(zip(columns, values)))
