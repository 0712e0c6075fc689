"""Files whose checksum is compared as a whole when they are opened."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import xxhash

from storage.arrow_numpy import to_numpy
from storage.backends.base import Backend
from storage.errors import CorruptionError
from storage.manifest import FileRef

__all__ = ["check_whole", "read_row_file"]


def check_whole(mapped: np.ndarray, backend: Backend, ref: FileRef) -> None:
    """Compare the checksum of a whole mapped file.

    Raises:
        CorruptionError: If it differs.
    """
    found = xxhash.xxh3_128_hexdigest(mapped.data)
    if found != ref.xxh3:
        raise CorruptionError(
            f"{backend.place(ref.path)}: the checksum of the file is {found}, the snapshot says {ref.xxh3}; "
            "copy it back from a backup"
        )


def read_row_file(backend: Backend, ref: FileRef) -> np.ndarray:
    """The row numbers of a file, ascending int64 (rows,), on its map.

    Raises:
        CorruptionError: If it is damaged, or its numbers are not ascending.
    """
    mapped, _ = backend.map(ref)
    check_whole(mapped, backend, ref)
    try:
        rows = to_numpy(pa.ipc.open_file(pa.py_buffer(mapped)).get_batch(0).column(0), np.int64)
    except (pa.ArrowInvalid, ValueError) as error:
        raise CorruptionError(f"{backend.place(ref.path)}: these are no row numbers: {error}") from error
    if len(rows) != ref.rows or (len(rows) and rows[0] < 0) or (np.diff(rows) < 1).any():
        raise CorruptionError(
            f"{backend.place(ref.path)}: {len(rows)} row numbers, wanted {ref.rows} ascending ones; "
            "copy it back from a backup"
        )
    return rows
