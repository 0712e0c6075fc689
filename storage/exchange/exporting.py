"""Writing rows of a store for other programs."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.compute as pc

from storage.disk import write_errors
from storage.errors import StorageError
from storage.exchange.batches import RowBatch, read_batches
from storage.exchange.hf_folder import write_hf_folder
from storage.exchange.media import is_image
from storage.exchange.parquet_files import write_parquet
from storage.exchange.record import FORMATS, ExportRecord, write_record
from storage.exchange.tar_files import write_tars
from storage.files import fsync_directory, fsync_file
from storage.snapshots import holds_store
from storage.view import View

__all__ = ["ExportReport", "export_rows"]

_WRITERS = {"webdataset": write_tars, "parquet": write_parquet, "hf": write_hf_folder}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What was written. path: the folder; bytes: of all its files."""

    path: Path
    format: str
    rows: int
    files: int
    bytes: int


def export_rows(
    view: View,
    path: Path,
    format: str,
    *,
    file_bytes: int,
    progress: Callable[[int, int], None] | None,
) -> ExportReport:
    """Write the rows of a view into a new folder, which appears when it is whole.

    Raises:
        StorageError: If the path exists or cannot be written, or the format is none of webdataset, parquet,
            hf.
        StorageFullError: If the disk is full.
        CorruptionError: If a shard is damaged.
    """
    if format not in FORMATS:
        raise StorageError(f"format {format!r} is none of {', '.join(FORMATS)}")
    path = path.absolute()
    if path.exists():
        raise StorageError(f"{path}: there is something of this name already; give a new path")
    around = next(filter(holds_store, path.parents), None)
    if around is not None:
        raise StorageError(f"{path}: lies inside of the store {around}; give a path beside it")
    record = ExportRecord(
        format=format,
        rows=len(view),
        columns={name: spec.type for name, spec in view.store.snapshot.columns.items()},
        tensors=dict(view.store.snapshot.tensors),
        blobs=_blob_kind(view),
        files=(),
    )
    temporary = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        with write_errors(temporary):
            temporary.mkdir(parents=True)
            names = _WRITERS[format](temporary, _counted(view, progress), record, file_bytes)
            write_record(temporary, replace(record, files=tuple(names)))
            files = sorted(temporary.iterdir())
            for file in files:
                fsync_file(file)
            fsync_directory(temporary)
            temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    fsync_directory(path.parent)
    num_bytes = sum((path / file.name).stat().st_size for file in files)
    return ExportReport(path=path, format=format, rows=len(view), files=len(files), bytes=num_bytes)


def _blob_kind(view: View) -> str | None:
    with_blob = pc.index(pc.is_valid(view.column("bytes")), True).as_py()
    if with_blob < 0:
        return None
    return "image" if is_image(view.store.blob(int(view.rows[with_blob]))) else "binary"


def _counted(view: View, progress: Callable[[int, int], None] | None) -> Iterator[RowBatch]:
    done = 0
    for batch in read_batches(view):
        yield batch
        done += len(batch.keys)
        if progress is not None:
            progress(done, len(view))
