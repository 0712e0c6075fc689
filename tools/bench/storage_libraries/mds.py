"""MosaicML Streaming: MDS shards, read from a local folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tools.bench.storage_libraries import torchvision_ops  # noqa: F401  before streaming
from tools.bench.storage_libraries.task import EpochTask, Task, WriteTask, make_durable

from streaming import MDSWriter, StreamingDataset  # isort: skip


class Epoch64(EpochTask):
    """Row by row through `__getitem__`: its shuffled stream first waits seconds for its own threads."""

    def prepare(self) -> None:
        images = np.load(self.data / self.source, mmap_mode="r")
        shape = ",".join(map(str, images.shape[1:]))
        with MDSWriter(out=str(self.folder / "mds"), columns={"image": f"ndarray:uint8:{shape}"}) as writer:
            for image in images:
                writer.write({"image": np.asarray(image)})

    def epoch(self, order: np.ndarray) -> tuple[int, int]:
        return self.collect(self.dataset[row]["image"] for row in order.tolist())

    def open_rows(self) -> None:
        self.dataset = StreamingDataset(local=str(self.folder / "mds"), batch_size=1)


class Epoch224(Epoch64):
    source = "images224.npy"


class Write(WriteTask):
    """Bytes in MDS shards with xxh3 hashes; every file is synced afterwards."""

    def write(self, target: Path) -> None:
        columns = {"key": "str", "picture": "bytes"}
        with MDSWriter(out=str(target), columns=columns, hashes=["xxh3_64"]) as writer:
            for key, picture in zip(self.keys, self.pictures):
                writer.write({"key": key, "picture": picture})
        make_durable(target)


TASKS: dict[str, Callable[[Path, Path], Task]] = {"epoch64": Epoch64, "epoch224": Epoch224, "write": Write}
