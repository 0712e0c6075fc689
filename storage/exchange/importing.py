"""Reading back what was exported: the same keys, blobs, metadata and tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from storage.errors import CorruptionError
from storage.exchange.batches import RowBatch, number_files
from storage.exchange.hf_folder import read_hf_folder
from storage.exchange.parquet_files import read_parquet
from storage.exchange.record import ExportRecord, read_record
from storage.exchange.tar_files import read_tars
from storage.manifest import Snapshot
from storage.part_writer import PartWriter
from storage.sealed import SealedPart, publish_parts
from storage.shards import ReaderPool
from storage.staging import Staging

__all__ = ["import_rows"]

_READERS = {"webdataset": read_tars, "parquet": read_parquet, "hf": read_hf_folder}


def import_rows(
    readers: ReaderPool,
    path: Path,
    *,
    message: str,
    part_bytes: int,
    progress: Callable[[int, int], None] | None,
) -> Snapshot:
    """Add the rows of an exported folder in one snapshot, in parts of about `part_bytes`.

    Raises:
        StorageError: If the folder is no export.
        CorruptionError: If it is damaged or rows are missing.
        DuplicateKeyError, ColumnTypeError, TensorColumnError: If the rows do not fit the store.
    """
    record = read_record(path)
    # Its id is in the name of every part, so that gc keeps the first ones even if this takes long.
    staging = Staging(readers.backend)
    try:
        sealed = list(_seal_parts(readers, path, record, staging.id, part_bytes, progress))
        found = sum(map(len, sealed))
        if found != record.rows:
            raise CorruptionError(
                f"{path}: {found} rows, the export had {record.rows}; copy the folder again from where it "
                "was made"
            )
        return publish_parts(readers, sealed, message)
    finally:
        staging.close()


def _seal_parts(
    readers: ReaderPool,
    path: Path,
    record: ExportRecord,
    import_id: str,
    part_bytes: int,
    progress: Callable[[int, int], None] | None,
) -> Iterator[SealedPart]:
    done = 0
    batches = number_files(_READERS[record.format](path, record), part_bytes)
    for number, group in groupby(batches, itemgetter(0)):
        with PartWriter(
            readers,
            tensors=record.tensors,
            columns={name: kind for name, kind in record.columns.items() if kind != "null"},
            part_id=f"{import_id}{number:06x}",
        ) as writer:
            for _, batch in group:
                _add(writer, batch, record)
                done += len(batch.keys)
                if progress is not None:
                    progress(done, record.rows)
        assert writer.sealed is not None
        yield writer.sealed


def _add(writer: PartWriter, batch: RowBatch, record: ExportRecord) -> None:
    for i, (key, blob, row) in enumerate(zip(batch.keys, batch.blobs, _values(batch, record))):
        tensors = {
            name: np.asarray(rows.values[i]) if rows.present[i] else None
            for name, rows in batch.tensors.items()
        }
        writer.add(key, blob, tensors, **row)


def _values(batch: RowBatch, record: ExportRecord) -> Iterator[dict[str, Any]]:
    for row in batch.rows():
        for name, value in row.items():
            if value is not None and record.columns[name] == "json":
                row[name] = json.loads(value)
        yield row
