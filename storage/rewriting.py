"""Writing rows of existing parts into a new part; every row keeps its number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from storage.arrow_numpy import from_numpy
from storage.blobs import Blob
from storage.columns import ARROW_TYPES, Scalar
from storage.keys import hash_key
from storage.manifest import Part, Snapshot
from storage.part_builder import PartBuilder
from storage.shards import PartReader
from storage.staging import Staging
from storage.tensor_shard import TensorShard
from storage.tensors import TensorSpool

__all__ = ["PartRows", "copy_places", "write_part"]

_CHUNK_ROWS = 4096


@dataclass(slots=True)
class PartRows:
    """Rows of a part that go into another one. rows: int64 (n,), ascending, counted within the part."""

    reader: PartReader
    rows: np.ndarray

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """The store's numbers of rows of the part."""
        return self.reader.global_rows(rows)

    def key(self, row: int) -> bytes:
        """UTF-8 of a row's key."""
        return self.reader.keys("always").encoded_key(row)

    def blob(self, row: int) -> Blob | None:
        """A row's blob."""
        return self.reader.blob(row, "always")

    def column(self, name: str, kind: str, rows: np.ndarray) -> list[Scalar]:
        """Values of a metadata column."""
        column = self.reader.column(name, ARROW_TYPES[kind], "always")
        values: list[Scalar] = column.take(from_numpy(rows)).to_pylist()
        return values

    def copy_tensor(self, spool: TensorSpool) -> None:
        """Append the values of all rows to a column of the new part."""
        _copy_tensor(self.reader, self.rows, spool)


def write_part(staging: Staging, part_id: str, snapshot: Snapshot, sources: Sequence[PartRows]) -> Part:
    """Make a part of the rows of others, which are neighbours in a snapshot and are given in its order."""
    row_ids = np.concatenate([source.numbers(source.rows) for source in sources])
    types = {name: spec.type for name, spec in snapshot.columns.items()}
    if int(row_ids[-1] - row_ids[0]) + 1 != len(row_ids):
        types["row"] = "int"
    builder = PartBuilder(staging, part_id, lambda: types)
    try:
        held = {name for source in sources for name in source.reader.part.tensors}
        for name, spec in snapshot.tensors.items():
            if name in held:
                builder.add_tensor(name, spec)
        for source in sources:
            _copy_rows(source, builder, types)
            for spool in builder.tensors.values():
                source.copy_tensor(spool)
        return builder.seal(row_ids)
    finally:
        builder.close()


def _copy_rows(source: PartRows, builder: PartBuilder, types: dict[str, str]) -> None:
    names = [name for name, kind in types.items() if kind != "null" and name != "row"]
    for start in range(0, len(source.rows), _CHUNK_ROWS):
        chunk = source.rows[start : start + _CHUNK_ROWS]
        columns = {name: source.column(name, types[name], chunk) for name in names}
        if "row" in types:
            columns["row"] = source.numbers(chunk).tolist()
        for i, row in enumerate(chunk.tolist()):
            key = source.key(row)
            values = {name: column[i] for name, column in columns.items()}
            builder.add(key, hash_key(key), source.blob(row), values)


def _copy_tensor(reader: PartReader, rows: np.ndarray, spool: TensorSpool) -> None:
    if spool.name not in reader.part.tensors:
        spool.skip(len(rows))
        return
    shard = reader.tensor(spool.name, spool.spec)
    copy_places(shard, shard.positions(rows), spool)


def copy_places(shard: TensorShard, places: np.ndarray, spool: TensorSpool) -> None:
    """Append values of a shard, given by their place in it; -1 stands for a row without a value."""
    is_same_run = np.where(places[:-1] < 0, places[1:] < 0, np.diff(places) == 1)
    for run in np.split(places, np.flatnonzero(~is_same_run) + 1):
        if len(run) and run[0] < 0:
            spool.skip(len(run))
            continue
        for start in range(0, len(run), _CHUNK_ROWS):
            wanted = slice(int(run[start]), int(run[min(start + _CHUNK_ROWS, len(run)) - 1]) + 1)
            shard.check(wanted, "always")
            spool.append(spool.check(shard.array[wanted], spool.name, rows=wanted.stop - wanted.start))
