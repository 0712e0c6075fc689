"""Where the samples of an epoch are cut into global batches, and these into the ranks' shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from datapipe.order import Positions, random_numbers, rank_bounds

__all__ = ["Batches", "Buckets", "CutBatches", "FixedBatches", "Share", "cut_windows"]

_STEP_STREAM: Final = 4
_WINDOW: Final = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank makes of one global batch."""

    positions: NDArray[np.int64]  # in the view
    image_size: tuple[int, int] | None = None  # (height, width) of its pictures; None for the loader's own


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

    def image_size(self, positions: NDArray[np.int64]) -> tuple[int, int] | None:
        """(height, width) of the pictures of a batch of one row or more; None for the loader's own."""


class Buckets(Protocol):
    """Another way to cut an epoch than by a number of rows. A declaration, like an order."""

    multiple_of: int  # rows of a full batch are a multiple of it

    def batches(
        self, positions: Positions, *, num_rows: int, num_samples: int, seed: int, epoch: int, drop_last: bool
    ) -> Batches:
        """Cut one epoch over a view of num_rows."""

    def fingerprint(self) -> int:
        """A number that other buckets do not have."""


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

    def image_size(self, positions: NDArray[np.int64]) -> tuple[int, int] | None:
        return None


class CutBatches:
    """Batches of any number of rows, one after the other."""

    def __init__(self, batches: list[NDArray[np.int64]]) -> None:
        self._order = np.concatenate([np.empty(0, np.int64), *batches])
        self._ends = np.cumsum([len(batch) for batch in batches], dtype=np.int64)

    def count(self, start: int) -> int:
        return len(self._ends) - self._first(start)

    def bounds(self, start: int, index: int) -> tuple[int, int]:
        batch = self._first(start) + index
        return int(self._ends[batch - 1]) if batch else 0, int(self._ends[batch])

    def take(self, begin: int, end: int) -> NDArray[np.int64]:
        places: NDArray[np.int64] = self._order[begin:end]
        return places

    def image_size(self, positions: NDArray[np.int64]) -> tuple[int, int] | None:
        return None

    def _first(self, start: int) -> int:
        return int(np.searchsorted(self._ends, start, side="right"))


def cut_windows(
    positions: Positions,
    num_samples: int,
    *,
    seed: int,
    epoch: int,
    cut: Callable[[NDArray[np.int64]], tuple[list[NDArray[np.int64]], NDArray[np.int64]]],
) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Cut windows of 16,384 samples; the batches of a window change places.

    Args:
        cut: Full batches of a pool of positions, and the rest, which joins the pool of the next window.

    Returns:
        All full batches, and the rest of the last window.
    """
    batches: list[NDArray[np.int64]] = []
    left = np.empty(0, np.int64)
    for window, start in enumerate(range(0, num_samples, _WINDOW)):
        pool = np.concatenate([left, positions.take(start, min(start + _WINDOW, num_samples))])
        found, left = cut(pool)
        raw = random_numbers(len(found), seed=seed, epoch=epoch, stream=_STEP_STREAM, window=window)
        batches.extend(found[index] for index in np.argsort(raw, kind="stable"))
    return batches, left
