"""Whether the index of a part says the same as its key table."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.arrow_numpy import from_numpy
from storage.backends.base import Backend
from storage.checked_files import read_row_file
from storage.errors import StorageError
from storage.index import OWN_COLUMNS
from storage.manifest import Part

__all__ = ["index_problems"]

_BATCH_ROWS = 1 << 16
_HEX_DIGITS = np.array([list(f"{byte:02x}".encode()) for byte in range(256)], np.uint8)


def index_problems(backend: Backend, part: Part) -> list[str]:
    """What differs between the Parquet file and the Arrow file of keys, of which both have their checksum.

    Keys, hashes and sizes must be equal row by row, and so must the row numbers of a part that lists them.
    """
    try:
        with pq.ParquetFile(backend.local_file(part.index)) as file:
            if file.metadata.num_rows != part.rows:
                return [f"{file.metadata.num_rows} rows, the snapshot says {part.rows}"]
            wanted = _wanted(backend, part)
            missing = [name for name in wanted if name not in file.schema_arrow.names]
            if missing:
                return [f"there is no column {missing[0]!r}"]
            return list(_differences(file, wanted))
    except StorageError as error:
        return [str(error)]
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        return [f"the index cannot be read: {error}"]


def _wanted(backend: Backend, part: Part) -> dict[str, pa.Array]:
    """Column -> what the key table says about it."""
    table = pa.ipc.open_file(pa.py_buffer(backend.map(part.keys)[0])).get_batch(0)
    has_blob = np.asarray(table.column("blob_offset").to_numpy()) >= 0
    wanted = {
        "key": table.column("key"),
        "hash": _hex_text(table.column("blob_xxh3"), has_blob),
        "bytes": pa.array(table.column("blob_bytes").to_numpy(), mask=~has_blob),
    }
    if part.row_ids is not None:
        wanted["row"] = from_numpy(read_row_file(backend, part.row_ids))
    return wanted


def _hex_text(digests: pa.Array, present: np.ndarray) -> pa.Array:
    """16 bytes of each row as 32 hexadecimal digits; null where not present."""
    raw = np.frombuffer(digests.buffers()[1], np.uint8, 16 * len(digests), 16 * digests.offset)
    ends = np.arange(0, 32 * len(digests) + 1, 32, np.int64)
    validity = np.packbits(present, bitorder="little")
    return pa.LargeStringArray.from_buffers(
        len(digests), pa.py_buffer(ends), pa.py_buffer(_HEX_DIGITS[raw]), pa.py_buffer(validity)
    )


def _differences(file: pq.ParquetFile, wanted: dict[str, pa.Array]) -> Iterator[str]:
    """The first difference of each column."""
    start = 0
    told: set[str] = set()
    for batch in file.iter_batches(_BATCH_ROWS, columns=list(wanted)):
        for name, values in wanted.items():
            found = batch.column(name).cast(OWN_COLUMNS.get(name, pa.int64()))
            theirs = values.slice(start, batch.num_rows)
            if name not in told and not found.equals(theirs):
                told.add(name)
                pairs = zip(found.to_pylist(), theirs.to_pylist())
                i, (ours, other) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
                yield f"row {start + i} of the part has {name} {ours!r}, its key table says {other!r}"
        start += batch.num_rows
