"""Looking into the blobs: with the LMDB library, as another program would, and with decoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import lmdb
import numpy as np

from storage.columns import ARROW_TYPES
from storage.keys import NO_BLOB, hash_key, lmdb_key
from storage.manifest import Snapshot
from storage.shards import PartReader

__all__ = ["Decoder", "Decoders", "database_problems", "decoder_of", "decoding_problems", "key_problems"]

Decoder = Callable[[memoryview], object]
"""Raises ValueError when the bytes are not what they should be."""

Decoders = Decoder | Mapping[str, Decoder]
"""One for all blobs, or by the value of the column `modality`."""

_MODALITY = "modality"


def database_problems(reader: PartReader) -> Iterator[str]:
    """Whether LMDB itself finds under every key the bytes that the key table points to, and nothing else.

    A row whose blob is that of another row has no entry of its own.
    """
    ref = reader.part.blobs
    assert ref is not None
    table = reader.keys("always")
    rows = np.flatnonzero(table.blob_offset != NO_BLOB).tolist()
    path = str(reader.backend.local_file(ref))
    try:
        with (
            lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=False) as database,
            database.begin(buffers=True) as transaction,
        ):
            num_found, places = 0, set()
            for row in rows:
                place = int(table.blob_offset[row]), int(table.blob_bytes[row])
                value = transaction.get(lmdb_key(table.encoded_key(row)))
                if value is None:
                    if place not in places:
                        yield f"LMDB finds no entry for key {table.key(row)!r}"
                    continue
                num_found += 1
                places.add(place)
                if value != reader.blob(row, "always"):
                    yield f"LMDB finds other bytes for key {table.key(row)!r} than the key table points to"
            entries = database.stat()["entries"]
            if entries != num_found:
                yield f"LMDB has {entries} entries, {num_found} of them for keys of the key table"
    except lmdb.Error as error:
        yield f"LMDB cannot read the file: {error}"


def key_problems(reader: PartReader) -> Iterator[str]:
    """Whether the search index of the key table lists the hash of every key once."""
    table = reader.keys("always")
    hashes = np.array([hash_key(table.encoded_key(row)) for row in range(len(table))], np.uint64)
    order = np.argsort(hashes, kind="stable")
    if not np.array_equal(hashes[order], table.sorted_hash):
        yield "the sorted hashes are not those of the keys"
    elif not np.array_equal(np.sort(table.sorted_row), np.arange(len(table))):
        yield "the rows of the sorted hashes are not all rows of the part"
    elif not np.array_equal(hashes[table.sorted_row], table.sorted_hash):
        yield "a sorted hash stands beside the row of another key"


def decoding_problems(
    reader: PartReader, rows: np.ndarray, snapshot: Snapshot, decoders: Decoders
) -> Iterator[str | None]:
    """Decode the blobs of rows of a part; for each that has a decoder what is wrong, or None."""
    decode_of = decoder_of(reader, snapshot, decoders)
    for row in rows.tolist():
        blob = reader.blob(row, "first-read")
        decode = decode_of(row)
        if blob is None or decode is None:
            continue
        try:
            decode(blob)
        except (ValueError, OSError) as error:
            number = int(reader.global_rows(np.array([row]))[0])
            yield f"row {number}, key {reader.keys('never').key(row)!r}, does not decode: {error}"
        else:
            yield None


def decoder_of(reader: PartReader, snapshot: Snapshot, decoders: Decoders) -> Callable[[int], Decoder | None]:
    """What decodes the blob of a row; of a modality such as image+text the first word counts."""
    if not isinstance(decoders, Mapping):
        return lambda row: decoders
    spec = snapshot.columns.get(_MODALITY)
    if spec is None or spec.type != "string":
        return lambda row: None
    values: list[Any] = reader.column(_MODALITY, ARROW_TYPES["string"], "first-read").to_pylist()
    return partial(_by_modality, decoders, values)


def _by_modality(decoders: Mapping[str, Decoder], values: list[str | None], row: int) -> Decoder | None:
    return decoders.get((values[row] or "").partition("+")[0])
