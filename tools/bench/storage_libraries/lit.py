"""LitData: optimised chunks, streamed from a local folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.storage_libraries import torchvision_ops  # noqa: F401  before litdata
from tools.bench.storage_libraries.task import EpochTask, Task, WriteTask, make_durable

from litdata import StreamingDataset  # isort: skip
from litdata.streaming import Cache  # isort: skip


def write_chunks(target: Path, items: Any) -> None:
    """Chunks of 64 MB, as `litdata.optimize` writes them, without its worker processes."""
    cache = Cache(str(target), chunk_bytes="64MB")
    for number, item in enumerate(items):
        cache._add_item(number, item)
    cache.done()
    cache.merge(1)


class Epoch64(EpochTask):
    """The library's own shuffled stream of arrays, in one process."""

    def prepare(self) -> None:
        images = np.load(self.data / self.source, mmap_mode="r")
        write_chunks(self.folder / "chunks", ({"image": np.asarray(image)} for image in images))

    def open_rows(self) -> None:
        self.dataset = StreamingDataset(str(self.folder / "chunks"), shuffle=True)

    def epoch(self, order: np.ndarray) -> tuple[int, int]:
        return self.collect(sample["image"] for sample in self.dataset)


class Epoch224(Epoch64):
    source = "images224.npy"


class Bytes64(Epoch64):
    """The same pixels as raw bytes, which the reader must give a dtype and a shape."""

    def prepare(self) -> None:
        images = np.load(self.data / self.source, mmap_mode="r")
        write_chunks(self.folder / "chunks", (image.tobytes() for image in images))

    def epoch(self, order: np.ndarray) -> tuple[int, int]:
        return self.collect(np.frombuffer(sample, np.uint8).reshape(self.shape) for sample in self.dataset)


class Bytes224(Bytes64):
    source = "images224.npy"


class Write(WriteTask):
    """Chunks of bytes; every file is synced afterwards."""

    def write(self, target: Path) -> None:
        write_chunks(target, ({"key": k, "picture": p} for k, p in zip(self.keys, self.pictures)))
        make_durable(target)


TASKS: dict[str, Callable[[Path, Path], Task]] = {
    "epoch64": Epoch64,
    "epoch224": Epoch224,
    "epoch64_bytes": Bytes64,
    "epoch224_bytes": Bytes224,
    "write": Write,
}
