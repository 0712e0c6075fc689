"""This project's loader."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from torch import Tensor

from datapipe import ImageField, Loader
from storage import FeatureStore
from tools.bench.loader_libraries.decoder import SIZE
from tools.bench.loader_libraries.pictures import (
    BATCH_SIZE,
    NUM_WORKERS,
    FirstBatchTask,
    PictureTask,
    pictures_of,
)
from tools.bench.storage_libraries.task import Result, Task, key_of, warm

IMAGE = ImageField(size=SIZE, resample="linear", pixels="uint8")


class Pictures(PictureTask):
    """`Loader` with two threads; pictures come channels first, in channels-last memory."""

    def prepare(self) -> None:
        store = FeatureStore.create(self.folder, exist_ok=True)
        with store.writer() as writer:
            for row, picture in enumerate(pictures_of(self.data)):
                writer.add(key_of(row), picture, caption=f"a picture of number {row}")

    def open_pictures(self) -> None:
        view = FeatureStore.open(self.folder).select()
        self.loader = Loader(view, batch_size=BATCH_SIZE, image=IMAGE, num_threads=NUM_WORKERS)

    def batches(self, epoch: int) -> Iterable[Tensor]:
        return (batch.images.permute(0, 2, 3, 1) for batch in self.loader)


class First(FirstBatchTask):
    """Store, view, loader and batch; the parts are given apart."""

    rows_of_a_shard = 4

    def prepare(self) -> None:
        store = FeatureStore.create(self.folder, exist_ok=True)
        parts = []
        pictures = pictures_of(self.data)
        for start in range(0, len(pictures), self.rows_of_a_shard):
            with store.part_writer() as writer:
                for row in range(start, min(start + self.rows_of_a_shard, len(pictures))):
                    writer.add(key_of(row), pictures[row], caption=f"a picture of number {row}")
            parts.append(writer.sealed)
        store.publish_parts(parts)

    def open(self) -> None:
        warm(self.folder)

    def first_batch(self) -> Tensor:
        started = time.perf_counter()
        view = FeatureStore.open(self.folder).select()
        opened = time.perf_counter()
        loader = Loader(view, batch_size=self.batch_size, image=IMAGE, num_threads=NUM_WORKERS)
        self.running = iter(loader)
        batch = next(self.running)
        self.parts = {"open_seconds": opened - started, "loader_seconds": time.perf_counter() - opened}
        return batch.images

    def run(self, round_number: int) -> Result:
        found = super().run(round_number)
        self.running.close()
        return {**found, **self.parts}


class Tensors(Task):
    """A tensor column in shuffled and in consecutive batches of 256."""

    batch_size = 256
    source = "tensors64.npy"

    def prepare(self) -> None:
        tensors = np.load(self.data / self.source, mmap_mode="r")
        store = FeatureStore.create(self.folder, exist_ok=True)
        with store.writer(tensors={"image": (tensors.dtype, tensors.shape[1:])}) as writer:
            for row, tensor in enumerate(tensors):
                writer.add(key_of(row), None, {"image": np.asarray(tensor)})

    def open(self) -> None:
        warm(self.folder)
        self.store = FeatureStore.open(self.folder)
        self.loaders = {
            shuffle: Loader(
                self.store.select(),
                batch_size=self.batch_size,
                image=None,
                tensors=["image"],
                columns=(),
                shuffle=shuffle,
            )
            for shuffle in (True, False)
        }

    def run(self, round_number: int) -> Result:
        shuffled, copied = self._epoch(shuffle=True)
        consecutive, viewed = self._epoch(shuffle=False)
        return {
            "seconds": shuffled,
            "copied_per_sample": copied,
            "consecutive_seconds": consecutive,
            "copied_per_consecutive_sample": viewed,
        }

    def _epoch(self, *, shuffle: bool) -> tuple[float, float]:
        before, rows = self.store.counters.bytes_copied, 0
        started = time.perf_counter()
        for batch in self.loaders[shuffle]:
            rows += len(batch)
        elapsed = time.perf_counter() - started
        return elapsed / rows, (self.store.counters.bytes_copied - before) / rows


class Tensors224(Tensors):
    source = "tensors224.npy"


TASKS: dict[str, Callable[[Path, Path], Task]] = {
    "pictures": Pictures,
    "first": First,
    "tensors64": Tensors,
    "tensors224": Tensors224,
}
