"""Stores with very many rows, made in seconds: files in the published format, written from arrays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from storage import FeatureStore
from storage.files import fsync_file, hash_file
from storage.manifest import ColumnSpec, FileRef, Part, Snapshot
from storage.snapshots import publish

__all__ = ["large_key", "make_large_store"]

_DIGITS = 9


def large_key(row: int) -> str:
    """The key of a row."""
    return f"{row:0{_DIGITS}d}"


def make_large_store(path: Path, num_rows: int, part_rows: int) -> FeatureStore:
    """A store of metadata alone: a key and a width in each row, parts of `part_rows` rows."""
    store = FeatureStore.create(path)
    parts = [
        _write_part(path, number, start, min(start + part_rows, num_rows))
        for number, start in enumerate(range(0, num_rows, part_rows))
    ]

    def with_parts(newest: Snapshot) -> Snapshot:
        columns = {"width": ColumnSpec(type="int", since=parts[0].id)}
        return replace(newest, num_rows=num_rows, next_row=num_rows, columns=columns, parts=tuple(parts))

    publish(store.backend, with_parts)
    return store.refresh()


def _write_part(path: Path, number: int, start: int, stop: int) -> Part:
    rows = stop - start
    part_id = f"{number:08d}"
    digits = (np.arange(start, stop)[:, None] // 10 ** np.arange(_DIGITS - 1, -1, -1)) % 10 + ord("0")
    text = digits.astype(np.uint8)
    ends = pa.py_buffer(np.arange(0, (rows + 1) * _DIGITS, _DIGITS))
    keys = pa.LargeStringArray.from_buffers(rows, ends, pa.py_buffer(text))
    content = text.tobytes()
    hashes = np.array(
        [xxhash.xxh3_64_intdigest(content[at : at + _DIGITS]) for at in range(0, len(content), _DIGITS)],
        np.uint64,
    )
    order = np.argsort(hashes)
    table = pa.table(
        {
            "key": keys,
            "blob_offset": np.full(rows, -1),
            "blob_bytes": np.zeros(rows, np.int64),
            "blob_xxh3": pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(16), rows, [None, pa.py_buffer(bytes(16 * rows))]
            ),
            "sorted_hash": hashes[order],
            "sorted_row": order,
        }
    )
    key_file = path / f"index/part-{part_id}.keys.arrow"
    with pa.OSFile(str(key_file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    index_file = path / f"index/part-{part_id}.parquet"
    index = {
        "key": keys,
        "hash": pa.nulls(rows, pa.large_string()),
        "bytes": pa.nulls(rows, pa.int64()),
        "width": np.arange(start, stop) % 1000,
    }
    pq.write_table(pa.table(index), index_file, compression="zstd")
    return Part(
        id=part_id,
        first_row=start,
        end_row=stop,
        rows=rows,
        row_ids=None,
        index=_reference(path, index_file, rows),
        keys=_reference(path, key_file, rows),
        blobs=None,
        tensors={},
    )


def _reference(path: Path, file: Path, rows: int) -> FileRef:
    fsync_file(file)
    relative = file.relative_to(path).as_posix()
    return FileRef(path=relative, bytes=file.stat().st_size, xxh3=hash_file(file), rows=rows)
