"""Parquet: a row has `key`, `image` or `blob`, the metadata, and tensors as fixed-size lists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from storage.columns import ARROW_TYPES
from storage.exchange.arrow_batches import exported_file, read_rows
from storage.exchange.arrow_tensors import tensor_field_names, tensor_type, write_tensor
from storage.exchange.batches import RowBatch, number_files
from storage.exchange.record import ExportRecord

__all__ = ["read_parquet", "write_parquet"]

_BATCH_ROWS = 256


def write_parquet(
    folder: Path, batches: Iterator[RowBatch], record: ExportRecord, file_bytes: int
) -> list[str]:
    """Write the rows to `part-00000.parquet` and so on, of about `file_bytes` before compression.

    Returns:
        The names of the files.
    """
    schema = _schema(record)
    names: list[str] = []
    with ExitStack() as opened:

        def open_next() -> pq.ParquetWriter:
            opened.close()
            names.append(f"part-{len(names):05d}.parquet")
            return opened.enter_context(_open(folder / names[-1], schema, record))

        writer = open_next()
        for number, batch in number_files(batches, file_bytes):
            if number == len(names):
                writer = open_next()
            writer.write_table(_table(batch, schema, record), row_group_size=len(batch.keys))
    return names


def _open(path: Path, schema: pa.Schema, record: ExportRecord) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        path, schema, compression="zstd", use_dictionary=list(record.columns), write_page_checksum=True
    )


def _schema(record: ExportRecord) -> pa.Schema:
    fields = [
        pa.field("key", pa.large_string(), nullable=False),
        pa.field(record.blob_field, pa.large_binary()),
    ]
    fields += [pa.field(name, ARROW_TYPES[kind]) for name, kind in record.columns.items()]
    names = tensor_field_names(record)
    fields += [pa.field(names[name], tensor_type(spec)) for name, spec in record.tensors.items()]
    return pa.schema(fields)


def _table(batch: RowBatch, schema: pa.Schema, record: ExportRecord) -> pa.Table:
    columns = [pa.array(batch.keys, pa.large_string()), pa.array(batch.blobs, pa.large_binary())]
    columns += [batch.columns.column(name) for name in record.columns]
    columns += [write_tensor(batch.tensors[name], spec) for name, spec in record.tensors.items()]
    return pa.table(columns, schema=schema)


def read_parquet(folder: Path, record: ExportRecord) -> Iterator[RowBatch]:
    """The rows of the files."""
    for name in record.files:
        path = folder / name
        with exported_file(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(_BATCH_ROWS):
                yield read_rows(batch, batch.column(record.blob_field).to_pylist(), record)
