"""Hugging Face datasets: Arrow files in a save_to_disk folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from tools.bench.storage_libraries.task import EpochTask, Task, WriteTask, make_durable


class Epoch64(EpochTask):
    """Batches by row number in the numpy format."""

    def prepare(self) -> None:
        images = np.load(self.data / self.source, mmap_mode="r")
        features = datasets.Features({"image": datasets.Array3D(images.shape[1:], "uint8")})
        parts = [
            datasets.Dataset.from_dict({"image": np.asarray(images[start : start + 1000])}, features=features)
            for start in range(0, len(images), 1000)
        ]
        datasets.concatenate_datasets(parts).save_to_disk(self.folder / "saved")

    def open_rows(self) -> None:
        self.dataset = datasets.load_from_disk(self.folder / "saved").with_format("numpy")

    def epoch(self, order: np.ndarray) -> tuple[int, int]:
        total = 0
        for rows in self.batches(order):
            self.out[: len(rows)] = self.dataset[rows]["image"]
            total += self.first_bytes(len(rows))
        return len(order), total


class Epoch224(Epoch64):
    source = "images224.npy"


class Write(WriteTask):
    """The streaming Arrow writer behind `from_generator`; every file is synced afterwards."""

    def write(self, target: Path) -> None:
        features = datasets.Features({"key": datasets.Value("string"), "picture": datasets.Value("binary")})

        def rows() -> Iterator[dict[str, Any]]:
            for key, picture in zip(self.keys, self.pictures):
                yield {"key": key, "picture": picture}

        target.mkdir()
        writer = datasets.arrow_writer.ArrowWriter(path=str(target / "data.arrow"), features=features)
        for row in rows():
            writer.write(row)
        writer.finalize()
        make_durable(target)


TASKS: dict[str, Callable[[Path, Path], Task]] = {"epoch64": Epoch64, "epoch224": Epoch224, "write": Write}
