"""Writing the Parquet index of a part from a stream of rows whose columns are not known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from storage.arrow_numpy import from_list
from storage.columns import ARROW_TYPES, Scalar

__all__ = ["COMPRESSION", "IndexWriter", "QuarantineWriter"]

COMPRESSION = "snappy"
"""Of the index: larger than zstd by half, but a filter over text takes three quarters of the time."""

_CHUNK_ROWS = 16384
_CHUNK_TEXT_BYTES = 8 << 20
_GROUP_ROWS = 131072
_GROUP_BYTES = 64 << 20

OWN_COLUMNS = {"key": pa.large_string(), "hash": pa.large_string(), "bytes": pa.int64()}


class IndexWriter:
    """Buffers rows, spools them as Arrow chunks, and joins the chunks into one Parquet file."""

    def __init__(self, directory: Path, types: Callable[[], Mapping[str, str]]) -> None:
        self._directory = directory
        self._types = types
        self._values: dict[str, list[Scalar]] = {name: [] for name in OWN_COLUMNS}
        self._rows = 0
        self._text_bytes = 0
        self._chunks: list[Path] = []

    def add(self, row: Mapping[str, Scalar]) -> None:
        """Append one row: key, hash, bytes and the user's columns."""
        columns, rows = self._values, self._rows
        for name, value in row.items():
            values = columns.get(name)
            if values is None:
                values = columns[name] = []
            if len(values) < rows:
                values.extend([None] * (rows - len(values)))
            values.append(value)
            if type(value) is str:
                self._text_bytes += len(value)
        self._rows = rows + 1
        if self._rows >= _CHUNK_ROWS or self._text_bytes >= _CHUNK_TEXT_BYTES:
            self._spool()

    def add_rows(self, count: int, columns: Mapping[str, Sequence[Scalar]]) -> None:
        """Append rows; each column has one value for every row."""
        for name, added in columns.items():
            values = self._values.setdefault(name, [])
            values.extend([None] * (self._rows - len(values)))
            values.extend(added)
            self._text_bytes += sum(len(value) for value in added if type(value) is str)
        self._rows += count
        if self._rows >= _CHUNK_ROWS or self._text_bytes >= _CHUNK_TEXT_BYTES:
            self._spool()

    def _take_chunk(self, types: Mapping[str, str]) -> pa.Table:
        columns = {}
        for name, values in self._values.items():
            kind = OWN_COLUMNS.get(name) or ARROW_TYPES[types[name]]
            if name in OWN_COLUMNS or types[name] != "null":
                columns[name] = from_list(values + [None] * (self._rows - len(values)), kind)
        self._values = {name: [] for name in OWN_COLUMNS}
        self._rows = self._text_bytes = 0
        return pa.table(columns)

    def _spool(self) -> None:
        path = self._directory / f"index-{len(self._chunks):06d}.spool"
        table = self._take_chunk(self._types())
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        self._chunks.append(path)

    def write(self, path: Path) -> None:
        """Write the Parquet file; row groups are bounded in rows and bytes."""
        types = self._types()
        last = self._take_chunk(types)
        names = dict.fromkeys(name for table in (*self._read_chunks(), last) for name in table.column_names)
        schema = pa.schema(
            [pa.field(name, OWN_COLUMNS.get(name) or ARROW_TYPES[types[name]]) for name in names]
        )
        with pq.ParquetWriter(path, schema, compression=COMPRESSION, write_page_checksum=True) as writer:
            group: list[pa.Table] = []
            for table in (*self._read_chunks(), last):
                if group and sum(t.num_rows for t in group) + table.num_rows > _GROUP_ROWS:
                    _write_group(writer, group)
                    group = []
                group.append(_with_schema(table, schema))
                if sum(t.nbytes for t in group) >= _GROUP_BYTES:
                    _write_group(writer, group)
                    group = []
            if group:
                _write_group(writer, group)
        for chunk in self._chunks:
            chunk.unlink()

    def _read_chunks(self) -> Iterator[pa.Table]:
        for chunk in self._chunks:
            with pa.memory_map(str(chunk)) as source:
                yield pa.ipc.open_file(source).read_all()


def _write_group(writer: pq.ParquetWriter, tables: list[pa.Table]) -> None:
    table = pa.concat_tables(tables)
    if table.num_rows:
        writer.write_table(table, row_group_size=table.num_rows)


def _with_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = [
        table.column(field.name) if field.name in table.column_names else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


class QuarantineWriter:
    """Streams what was refused into a Parquet file: key, place, reason, data."""

    SCHEMA = pa.schema(
        {
            "key": pa.large_string(),
            "place": pa.large_string(),
            "reason": pa.large_string(),
            "data": pa.large_binary(),
        }
    )

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        self._records: list[dict[str, object]] = []
        self._bytes = 0
        self._writer = pq.ParquetWriter(path, self.SCHEMA, compression="zstd", write_page_checksum=True)

    def add(self, key: str, place: str, reason: str, data: bytes | None) -> None:
        """Append one record."""
        self._records.append({"key": key, "place": place, "reason": reason, "data": data})
        self.rows += 1
        self._bytes += len(data or b"")
        if self._bytes >= _CHUNK_TEXT_BYTES or len(self._records) >= _CHUNK_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._records:
            self._writer.write_table(pa.Table.from_pylist(self._records, schema=self.SCHEMA))
            self._records = []
            self._bytes = 0

    def close(self) -> None:
        """Finish the file."""
        self._flush()
        self._writer.close()
