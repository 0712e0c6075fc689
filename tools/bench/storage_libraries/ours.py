"""This project's feature store."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from storage import FeatureStore
from tools.bench.storage_libraries.task import (
    BATCH_SIZE,
    EpochTask,
    FilterTask,
    LookupTask,
    Result,
    Task,
    WriteTask,
    key_of,
)


class Epoch64(EpochTask):
    """Shuffled batches gathered from the map. The first epoch of a handle compares the checksums."""

    def prepare(self) -> None:
        images = np.load(self.data / self.source, mmap_mode="r")
        store = FeatureStore.create(self.folder, exist_ok=True)
        with store.writer(tensors={"image": (images.dtype, images.shape[1:])}) as writer:
            for row, image in enumerate(images):
                writer.add(key_of(row), None, {"image": np.asarray(image)})

    def epoch(self, order: np.ndarray) -> tuple[int, int]:
        total = 0
        for rows in self.batches(order):
            self.column.gather(rows, self.out[: len(rows)])
            total += self.first_bytes(len(rows))
        return len(order), total

    def run(self, round_number: int) -> Result:
        self.column = FeatureStore.open(self.folder).tensor("image")
        first = super().run(round_number)
        return {**super().run(round_number), "first_seconds": first["seconds"]}


class Epoch224(Epoch64):
    source = "images224.npy"


class Consecutive(Epoch64):
    """Batches of neighbouring rows, as views of the map; one byte of every page is read."""

    def open_rows(self) -> None:
        self.store = FeatureStore.open(self.folder)
        self.column = self.store.tensor("image")

    def run(self, round_number: int) -> Result:
        before = self.store.counters.bytes_copied
        started = time.perf_counter()
        for start in range(0, self.num_rows, BATCH_SIZE):
            batch = self.column[start : min(start + BATCH_SIZE, self.num_rows)]
            batch.reshape(-1)[::4096].sum()
        elapsed = time.perf_counter() - started
        return {
            "seconds": elapsed,
            "rows": self.num_rows,
            "bytes_copied": self.store.counters.bytes_copied - before,
        }


class Vectors:
    """The store of a million vectors with two metadata columns."""

    @staticmethod
    def prepare(data: Path, folder: Path) -> None:
        vectors = np.load(data / "vectors.npy", mmap_mode="r")
        table = pq.read_table(data / "samples.parquet").to_pydict()
        store = FeatureStore.create(folder, exist_ok=True)
        with store.writer(tensors={"vector": (vectors.dtype, vectors.shape[1:])}) as writer:
            for row, (width, caption) in enumerate(zip(table["width"], table["caption"])):
                writer.add(
                    key_of(row), None, {"vector": np.asarray(vectors[row])}, width=width, caption=caption
                )


class Lookup(LookupTask):
    """A copy of the row, with the key compared and the checksums of what is read for the first time."""

    def prepare(self) -> None:
        Vectors.prepare(self.data, self.folder)

    def open_rows(self) -> None:
        self.store = FeatureStore.open(self.folder)
        self.column = self.store.tensor("vector")
        self.column.gather(np.arange(self.num_rows // 64) * 64)

    def lookup(self) -> Callable[[str], object]:
        store, column = self.store, self.column
        return lambda key: column.row(store.row(key))


class Filter(FilterTask):
    """`select`: SQL over the index, ids out as a view."""

    def open(self) -> None:
        self.store = FeatureStore.open(self.folder)

    def prepare(self) -> None:
        Vectors.prepare(self.data, self.folder)

    def rows(self) -> np.ndarray:
        return self.store.select("width > 300 AND contains(caption, 'red')").rows


class Write(WriteTask):
    """One commit: blobs, checksums, index and key table, all synced before the snapshot is published."""

    def write(self, target: Path) -> None:
        with FeatureStore.create(target).writer() as writer:
            for key, picture in zip(self.keys, self.pictures):
                writer.add(key, picture)


TASKS: dict[str, Callable[[Path, Path], Task]] = {
    "epoch64": Epoch64,
    "epoch224": Epoch224,
    "consecutive": Consecutive,
    "lookup": Lookup,
    "filter": Filter,
    "write": Write,
}
