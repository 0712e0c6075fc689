"""No library: two threads decode pictures that are in memory into batches that were allocated before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tools.bench.loader_libraries.decoder import SIZE, decode_into
from tools.bench.loader_libraries.pictures import BATCH_SIZE, NUM_WORKERS, PictureTask, pictures_of
from tools.bench.storage_libraries.task import Task


class Pictures(PictureTask):
    """The bound that the decoder sets: nothing is read, nothing is shuffled but a list."""

    def open_pictures(self) -> None:
        self.pictures = pictures_of(self.data)
        self.pool = ThreadPoolExecutor(NUM_WORKERS)
        self.ring = np.empty((2, BATCH_SIZE, *SIZE, 3), np.uint8)

    def batches(self, epoch: int) -> Iterable[Tensor]:
        order = np.random.default_rng(epoch).permutation(len(self.pictures)).tolist()
        starts = range(0, len(order), BATCH_SIZE)
        waiting = [self._start(order, start) for start in starts[:1]]
        for number, start in enumerate(starts):
            waiting += [self._start(order, starts[number + 1])] if number + 1 < len(starts) else []
            for half in waiting.pop(0):
                half.result()
            yield torch.from_numpy(self.ring[number % 2][: len(order[start : start + BATCH_SIZE])])

    def _start(self, order: list[int], start: int) -> list:
        batch = self.ring[start // BATCH_SIZE % 2]
        rows = order[start : start + BATCH_SIZE]
        return [
            self.pool.submit(self._decode, rows[part::NUM_WORKERS], batch[part::NUM_WORKERS])
            for part in range(NUM_WORKERS)
        ]

    def _decode(self, rows: list[int], out: np.ndarray) -> None:
        for place, row in enumerate(rows):
            decode_into(self.pictures[row], out[place])


TASKS: dict[str, Callable[[Path, Path], Task]] = {"pictures": Pictures}
