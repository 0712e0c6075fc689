"""WebDataset: tar shards with a shuffle buffer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import webdataset

from tools.bench.storage_libraries.task import EpochTask, Task, WriteTask, key_of, make_durable

_BUFFER_ROWS = 1000


class Epoch64(EpochTask):
    """Shards in random order, rows through a shuffle buffer, raw bytes as pixels."""

    def prepare(self) -> None:
        images = np.load(self.data / self.source, mmap_mode="r")
        with webdataset.ShardWriter(str(self.folder / "%06d.tar"), maxcount=1000, verbose=0) as writer:
            for row, image in enumerate(images):
                writer.write({"__key__": key_of(row), "raw": image.tobytes()})

    def epoch(self, order: np.ndarray) -> tuple[int, int]:
        shards = [str(path) for path in sorted(self.folder.glob("*.tar"))]
        samples = webdataset.WebDataset(shards, shardshuffle=len(shards)).shuffle(_BUFFER_ROWS)
        return self.collect(np.frombuffer(sample["raw"], np.uint8).reshape(self.shape) for sample in samples)


class Epoch224(Epoch64):
    source = "images224.npy"


class Write(WriteTask):
    """One tar; it is synced afterwards."""

    def write(self, target: Path) -> None:
        target.mkdir()
        with webdataset.TarWriter(str(target / "000000.tar")) as writer:
            for key, picture in zip(self.keys, self.pictures):
                writer.write({"__key__": key, "jpg": picture})
        make_durable(target)


TASKS: dict[str, Callable[[Path, Path], Task]] = {"epoch64": Epoch64, "epoch224": Epoch224, "write": Write}
