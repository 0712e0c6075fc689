"""Lance: columnar files with random access."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tools.bench.storage_libraries.task import (
    EpochTask,
    FilterTask,
    LookupTask,
    Task,
    WriteTask,
    key_of,
    make_durable,
)


def fixed_rows(rows: np.ndarray) -> pa.FixedSizeListArray:
    """Rows of one array as fixed-size lists."""
    values = pa.array(np.ascontiguousarray(rows).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(values, len(values) // len(rows))


class Epoch64(EpochTask):
    """`take` of each batch, then one copy into it."""

    def prepare(self) -> None:
        images = np.load(self.data / self.source, mmap_mode="r")
        size = int(np.prod(images.shape[1:]))
        schema = pa.schema({"image": pa.list_(pa.uint8(), size)})

        def batches() -> Iterator[pa.RecordBatch]:
            for start in range(0, len(images), 1000):
                yield pa.record_batch([fixed_rows(images[start : start + 1000])], schema=schema)

        lance.write_dataset(batches(), self.folder / "data.lance", schema=schema)

    def open_rows(self) -> None:
        self.dataset = lance.dataset(self.folder / "data.lance")

    def epoch(self, order: np.ndarray) -> tuple[int, int]:
        total = 0
        flat = self.out.reshape(len(self.out), -1)
        for rows in self.batches(order):
            column = self.dataset.take(rows, columns=["image"]).column(0)
            filled = 0
            for chunk in column.chunks:
                values = chunk.flatten().to_numpy(zero_copy_only=True).reshape(len(chunk), -1)
                flat[filled : filled + len(chunk)] = values
                filled += len(chunk)
            total += self.first_bytes(filled)
        return len(order), total


class Epoch224(Epoch64):
    source = "images224.npy"


def write_vectors(data: Path, folder: Path) -> None:
    """A million rows, and a scalar index on the key."""
    vectors = np.load(data / "vectors.npy", mmap_mode="r")
    samples = pq.read_table(data / "samples.parquet")

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, len(vectors), 10_000):
            rows = range(start, min(start + 10_000, len(vectors)))
            part = samples.slice(start, len(rows)).combine_chunks()
            columns = [
                pa.array([key_of(row) for row in rows]),
                pa.array(rows, pa.int64()),
                part.column("width").chunk(0),
                part.column("caption").chunk(0),
                fixed_rows(vectors[rows.start : rows.stop]),
            ]
            yield pa.record_batch(columns, names=["key", "row", "width", "caption", "vector"])

    first = next(batches())
    dataset = lance.write_dataset(batches(), folder / "data.lance", schema=first.schema)
    dataset.create_scalar_index("key", "BTREE")


class Lookup(LookupTask):
    """A scanner with a filter on the indexed key."""

    num_lookups = 300

    def prepare(self) -> None:
        write_vectors(self.data, self.folder)

    def open_rows(self) -> None:
        self.dataset = lance.dataset(self.folder / "data.lance")

    def lookup(self) -> Callable[[str], object]:
        def find(key: str) -> object:
            table = self.dataset.to_table(columns=["vector"], filter=f"key = '{key}'")
            return table.column(0).chunk(0).flatten().to_numpy(zero_copy_only=True)

        return find


class Filter(FilterTask):
    """A scan with a pushed-down filter."""

    def prepare(self) -> None:
        write_vectors(self.data, self.folder)

    def open(self) -> None:
        self.dataset = lance.dataset(self.folder / "data.lance")

    def rows(self) -> np.ndarray:
        return self.dataset.to_table(columns=["row"], filter=self.condition).column(0).to_numpy()


class Write(WriteTask):
    """Binary columns; every file is synced afterwards."""

    def write(self, target: Path) -> None:
        schema = pa.schema({"key": pa.string(), "picture": pa.large_binary()})

        def batches() -> Iterator[pa.RecordBatch]:
            for start in range(0, len(self.keys), 500):
                columns = [
                    pa.array(self.keys[start : start + 500]),
                    pa.array(self.pictures[start : start + 500], pa.large_binary()),
                ]
                yield pa.record_batch(columns, schema=schema)

        lance.write_dataset(batches(), target, schema=schema)
        make_durable(target)


TASKS: dict[str, Callable[[Path, Path], Task]] = {
    "epoch64": Epoch64,
    "epoch224": Epoch224,
    "lookup": Lookup,
    "filter": Filter,
    "write": Write,
}
