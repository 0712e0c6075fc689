"""The task of every contender: JPEGs into shuffled batches of 64 pictures of 224 x 224, on two workers."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.bench.loader_libraries.decoder import stack
from tools.bench.storage_libraries.task import Result, Task, warm

__all__ = ["BATCH_SIZE", "NUM_WORKERS", "FirstBatchTask", "PictureTask", "data_loader", "pictures_of"]

BATCH_SIZE = 64
NUM_WORKERS = 2


def pictures_of(data: Path) -> list[bytes]:
    """The encoded pictures."""
    content = (data / "pictures.bin").read_bytes()
    ends = np.load(data / "pictures.npy").tolist()
    return [content[start:end] for start, end in zip([0, *ends], ends)]


def data_loader(dataset: Any, **options: Any) -> Iterable[Tensor]:
    """torch's DataLoader with two workers that are kept from epoch to epoch, over decoded pictures."""
    return torch.utils.data.DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        num_workers=NUM_WORKERS,
        persistent_workers=True,
        collate_fn=stack,
        **options,
    )


class PictureTask(Task):
    """One epoch a run. The first one, which starts workers, is not counted."""

    def open(self) -> None:
        torch.set_num_threads(1)
        warm(self.folder)
        self.open_pictures()

    @abstractmethod
    def open_pictures(self) -> None:
        """Open the library's files, and make its loader."""

    @abstractmethod
    def batches(self, epoch: int) -> Iterable[Tensor]:
        """The batches of one epoch: uint8 (B, 224, 224, 3)."""

    def run(self, round_number: int) -> Result:
        rows = total = 0
        started = time.perf_counter()
        for batch in self.batches(round_number):
            rows += len(batch)
            total += int(batch[:, 0, 0].sum())
        return {"seconds": time.perf_counter() - started, "rows": rows, "sum": total}


class FirstBatchTask(Task):
    """From nothing to the first batch of eight decoded pictures out of very many shards, in this process."""

    batch_size = 8

    @abstractmethod
    def first_batch(self) -> Tensor:
        """Open everything and deliver one shuffled batch."""

    def run(self, round_number: int) -> Result:
        started = time.perf_counter()
        batch = self.first_batch()
        elapsed = time.perf_counter() - started
        if len(batch) != self.batch_size:
            raise ValueError(f"the first batch has {len(batch)} pictures")
        return {"seconds": elapsed}
