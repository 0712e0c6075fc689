"""What the formats made of Arrow share: rows from a record batch, and what to say of a damaged file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from storage.blobs import Blob
from storage.columns import ARROW_TYPES
from storage.errors import CorruptionError
from storage.exchange.arrow_tensors import read_tensor, tensor_field_names
from storage.exchange.batches import RowBatch
from storage.exchange.record import ExportRecord

__all__ = ["exported_file", "read_rows"]


@contextmanager
def exported_file(path: Path) -> Iterator[None]:
    """Read a file of an export in this block.

    Raises:
        CorruptionError: If the block finds the file missing, damaged, or with other columns.
    """
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise CorruptionError(f"{path}: the file is not as it was exported: {error}; export again") from error


def read_rows(batch: pa.RecordBatch, blobs: Sequence[Blob | None], record: ExportRecord) -> RowBatch:
    """The rows of a batch with the columns that a record lists; `blobs` are theirs, in the same order."""
    names = tensor_field_names(record)
    columns = {name: batch.column(name).cast(ARROW_TYPES[kind]) for name, kind in record.columns.items()}
    return RowBatch(
        keys=batch.column("key").to_pylist(),
        blobs=blobs,
        columns=pa.table(columns),
        tensors={name: read_tensor(batch.column(names[name]), spec) for name, spec in record.tensors.items()},
    )
