"""Where the samples of an epoch are cut into global batches, and these into the ranks' shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from datapipe.order import Positions, rank_bounds

__all__ = ["Batches", "FixedBatches"]


class Batches(Protocol):
    """The global batches of one epoch. Nothing but `share` knows of ranks."""

    def count(self, start: int) -> int:
        """Batches from sample `start` of the epoch on."""

    def bounds(self, start: int, index: int) -> tuple[int, int]:
        """The samples (begin, end) of the batch `index` after sample `start`."""

    def take(self, begin: int, end: int) -> NDArray[np.int64]:
        """Positions in the view of one batch, int64 (end - begin,)."""

    def share(self, positions: NDArray[np.int64], *, rank: int, world_size: int) -> tuple[int, int]:
        """(low, high): the part of a batch that a rank gets; over the ranks they cover it once, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedBatches:
    """Batches of the same number of rows."""

    positions: Positions
    num_samples: int
    batch_size: int
    drop_last: bool

    def count(self, start: int) -> int:
        left = self.num_samples - start
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def bounds(self, start: int, index: int) -> tuple[int, int]:
        begin = start + index * self.batch_size
        return begin, min(begin + self.batch_size, self.num_samples)

    def take(self, begin: int, end: int) -> NDArray[np.int64]:
        return self.positions.take(begin, end)

    def share(self, positions: NDArray[np.int64], *, rank: int, world_size: int) -> tuple[int, int]:
        return rank_bounds(len(positions), rank=rank, world_size=world_size)
