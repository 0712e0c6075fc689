"""No library: rows of a mapped array gathered into a batch that was allocated before."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tools.bench.storage_libraries.task import Result, Task

_BATCH_SIZE = 256


class Tensors(Task):
    """The fastest that one thread can copy rows of the map."""

    source = "tensors64.npy"

    def open(self) -> None:
        self.tensors = np.load(self.data / self.source, mmap_mode="r")
        self.out = np.empty((_BATCH_SIZE, *self.tensors.shape[1:]), self.tensors.dtype)

    def run(self, round_number: int) -> Result:
        order = np.random.default_rng(round_number).permutation(len(self.tensors))
        order = order[: len(order) // _BATCH_SIZE * _BATCH_SIZE]
        started = time.perf_counter()
        for start in range(0, len(order), _BATCH_SIZE):
            np.take(self.tensors, order[start : start + _BATCH_SIZE], axis=0, out=self.out, mode="clip")
        return {"seconds": (time.perf_counter() - started) / len(order)}


class Tensors224(Tensors):
    source = "tensors224.npy"


TASKS: dict[str, Callable[[Path, Path], Task]] = {"tensors64": Tensors, "tensors224": Tensors224}
