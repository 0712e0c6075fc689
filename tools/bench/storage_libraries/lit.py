"""LitData: optimised chunks, streamed from a local folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.storage_libraries import torchvision_ops  # noqa: F401  before litdata
from tools.bench.storage_libraries.task import EpochTask, Task, WriteTask, make_durable

from litdata import StreamingDataLoader, StreamingDataset  # isort: skip
from litdata.streaming import Cache  # isort: skip


def write_chunks(target: Path, items: Any) -> None:
    """Chunks of 64 MB, as `litdata.optimize` writes them, without its worker processes."""
    cache = Cache(str(target), chunk_bytes="64MB")
    for number, item in enumerate(items):
        cache._add_item(number, item)
    cache.done()
    cache.merge(1)


class Epoch64(EpochTask):
    """The library's own shuffled stream; the loader has two workers for the larger pictures."""

    workers = 0

    def prepare(self) -> None:
        images = np.load(self.data / self.source, mmap_mode="r")
        write_chunks(self.folder / "chunks", ({"image": np.asarray(image)} for image in images))

    def open_rows(self) -> None:
        self.dataset = StreamingDataset(str(self.folder / "chunks"), shuffle=True)

    def epoch(self, order: np.ndarray) -> tuple[int, int]:
        if not self.workers:
            return self.collect(sample["image"] for sample in self.dataset)
        loader = StreamingDataLoader(self.dataset, batch_size=len(self.out), num_workers=self.workers)
        rows = total = 0
        for batch in loader:
            count = len(batch["image"])
            self.out[:count] = batch["image"].numpy()
            rows, total = rows + count, total + self.first_bytes(count)
        return rows, total


class Epoch224(Epoch64):
    source = "images224.npy"
    workers = 2


class Write(WriteTask):
    """Chunks of bytes; every file is synced afterwards."""

    def write(self, target: Path) -> None:
        write_chunks(target, ({"key": k, "picture": p} for k, p in zip(self.keys, self.pictures)))
        make_durable(target)


TASKS: dict[str, Callable[[Path, Path], Task]] = {"epoch64": Epoch64, "epoch224": Epoch224, "write": Write}
