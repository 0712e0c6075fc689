"""A folder as `datasets.Dataset.save_to_disk` writes it, made without that library.

Pictures are a column `image`, a struct of `bytes` and `path`, with the feature Image. Blobs of which the
first is no picture are a binary column `blob`. Tensors are fixed-size lists, one in the other for each axis.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from storage.blobs import Blob
from storage.columns import ARROW_TYPES
from storage.errors import StorageError
from storage.exchange.arrow_batches import exported_file, read_rows
from storage.exchange.arrow_tensors import nested_type, tensor_field_names, write_nested
from storage.exchange.batches import RowBatch, number_files
from storage.exchange.media import is_image
from storage.exchange.record import ExportRecord

__all__ = ["read_hf_folder", "write_hf_folder"]

_IMAGE_TYPE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
_MAX_IMAGE_BYTES = (1 << 31) - 1


def write_hf_folder(
    folder: Path, batches: Iterator[RowBatch], record: ExportRecord, file_bytes: int
) -> list[str]:
    """Write the rows to Arrow streams of about `file_bytes`, and the two files that describe them.

    Returns:
        The names of the Arrow files.

    Raises:
        StorageError: If a picture has 2 GiB or more, which the feature Image cannot hold.
    """
    schema = _schema(record)
    files: list[Path] = []
    are_images = record.blobs == "image"
    with ExitStack() as opened:

        def open_next() -> Any:
            opened.close()
            files.append(folder / f"data-{len(files):05d}.arrow")
            return opened.enter_context(pa.ipc.new_stream(str(files[-1]), schema))

        writer = open_next()
        for number, batch in number_files(batches, file_bytes):
            if number == len(files):
                writer = open_next()
            are_images = are_images and all(is_image(blob) for blob in batch.blobs if blob is not None)
            writer.write_batch(_record_batch(batch, schema, record))
    names = [path.rename(f"{path.with_suffix('')}-of-{len(files):05d}.arrow").name for path in files]
    features = {field.name: _feature(field.type) for field in schema}
    if are_images:
        features[record.blob_field] = {"_type": "Image"}
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    _write_json(folder / "dataset_info.json", info)
    _write_json(folder / "state.json", _state(names, folder.name))
    return names


def _schema(record: ExportRecord) -> pa.Schema:
    fields = [pa.field("key", pa.large_string())]
    if record.blobs is not None:
        kind = pa.large_binary() if record.blobs == "binary" else _IMAGE_TYPE
        fields.append(pa.field(record.blob_field, kind))
    fields += [pa.field(name, ARROW_TYPES[kind]) for name, kind in record.columns.items()]
    names = tensor_field_names(record)
    fields += [pa.field(names[name], nested_type(spec)) for name, spec in record.tensors.items()]
    return pa.schema(fields)


def _feature(kind: pa.DataType) -> dict[str, Any]:
    """A feature of `datasets` that has this type."""
    if pa.types.is_fixed_size_list(kind):
        return {"feature": _feature(kind.value_type), "length": kind.list_size, "_type": "Sequence"}
    if pa.types.is_struct(kind):
        return {field.name: _feature(field.type) for field in kind}
    names = {pa.float16(): "float16", pa.float32(): "float32", pa.float64(): "float64"}
    return {"dtype": names.get(kind, str(kind)), "_type": "Value"}


def _state(names: Sequence[str], seed: str) -> dict[str, Any]:
    return {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": xxhash.xxh3_64_hexdigest(seed.encode()),
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), "utf-8")


def _record_batch(batch: RowBatch, schema: pa.Schema, record: ExportRecord) -> pa.RecordBatch:
    columns = [pa.array(batch.keys, pa.large_string())]
    if record.blobs is not None:
        columns.append(_blob_column(batch, record.blobs))
    columns += [batch.columns.column(name).combine_chunks() for name in record.columns]
    columns += [write_nested(batch.tensors[name], spec) for name, spec in record.tensors.items()]
    return pa.record_batch(columns, schema=schema)


def _blob_column(batch: RowBatch, kind: str) -> pa.Array:
    if kind == "binary":
        return pa.array(batch.blobs, pa.large_binary())
    for key, blob in zip(batch.keys, batch.blobs):
        if blob is not None and memoryview(blob).nbytes > _MAX_IMAGE_BYTES:
            raise StorageError(
                f"key {key!r}: a blob of {memoryview(blob).nbytes} bytes does not fit the feature Image; "
                "export to parquet or webdataset"
            )
    data = pa.array(batch.blobs, pa.binary())
    paths = pa.nulls(len(batch.keys), pa.string())
    return pa.StructArray.from_arrays([data, paths], fields=list(_IMAGE_TYPE), mask=data.is_null())


def read_hf_folder(folder: Path, record: ExportRecord) -> Iterator[RowBatch]:
    """The rows of the Arrow files."""
    for name in record.files:
        path = folder / name
        with (
            exported_file(path),
            pa.memory_map(str(path)) as source,
            pa.ipc.open_stream(source) as reader,
        ):
            for batch in reader:
                yield read_rows(batch, _blobs(batch, record), record)


def _blobs(batch: pa.RecordBatch, record: ExportRecord) -> list[Blob | None]:
    if record.blobs is None:
        return [None] * batch.num_rows
    column = batch.column(record.blob_field)
    blobs: list[Blob | None] = (column if record.blobs == "binary" else column.field("bytes")).to_pylist()
    return blobs
