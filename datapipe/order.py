"""In which order an epoch visits its rows: a pure function of (seed, epoch, index)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BLOCK_ROWS",
    "WINDOW_BLOCKS",
    "BlockShuffle",
    "EpochOrder",
    "Order",
    "Positions",
    "ViewOrder",
    "random_numbers",
    "rank_bounds",
]

BLOCK_ROWS: Final = 64
WINDOW_BLOCKS: Final = 256

_BLOCK_STREAM: Final = 0
_ROW_STREAM: Final = 1


class Positions(Protocol):
    """The samples of one epoch, in order."""

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        """Positions in the view of the samples start..stop, int64; fewer where the epoch ends."""


class Order(Protocol):
    """What the Loader visits. A declaration: the samples of an epoch follow from (seed, epoch, index)."""

    def num_samples(self, num_rows: int) -> int:
        """Samples of an epoch over a view of num_rows."""

    def positions(self, num_rows: int, *, seed: int, epoch: int) -> Positions:
        """The samples of one epoch."""

    def fingerprint(self) -> int:
        """A number that another order does not have; a saved state of another order is refused by it."""


@dataclass(frozen=True, slots=True)
class BlockShuffle:
    """Every row once, in blocks that change places; see EpochOrder."""

    def num_samples(self, num_rows: int) -> int:
        return num_rows

    def positions(self, num_rows: int, *, seed: int, epoch: int) -> Positions:
        return EpochOrder(num_rows, seed=seed, epoch=epoch)

    def fingerprint(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class ViewOrder:
    """Every row once, in the order of the view, in every epoch."""

    def num_samples(self, num_rows: int) -> int:
        return num_rows

    def positions(self, num_rows: int, *, seed: int, epoch: int) -> Positions:
        return EpochOrder(num_rows, seed=seed, epoch=epoch, shuffle=False)

    def fingerprint(self) -> int:
        return 0


class EpochOrder:
    """The permutation of one epoch, computed piece by piece.

    Blocks of 64 neighbouring rows change places over the whole epoch; then the rows of each window of 256
    blocks (16,384 rows) are mixed. Up to one window this is a uniform permutation. Beyond, any row can land
    anywhere, and reads of one window touch 256 places of the store instead of 16,384. Nothing depends on
    ranks, workers or threads.

    The random numbers are raw Philox output keyed by (seed, epoch), whose stream NumPy guarantees; ranks of
    these numbers give the permutation.
    """

    def __init__(self, num_rows: int, *, seed: int, epoch: int, shuffle: bool = True) -> None:
        """Args:
        num_rows: Rows of the view, 0 or more.
        seed: Run seed; taken modulo 2^64.
        epoch: 0, 1, 2, ...
        shuffle: False gives 0, 1, 2, ... in every epoch.
        """
        self.num_rows = num_rows
        self._seed, self._epoch = seed, epoch
        self._shuffle = shuffle
        num_blocks = -(-num_rows // BLOCK_ROWS)
        self._blocks = self._permutation(num_blocks, _BLOCK_STREAM, 0) if shuffle else np.arange(num_blocks)
        sizes = np.minimum(num_rows - self._blocks * BLOCK_ROWS, BLOCK_ROWS)
        ends = np.concatenate([[0], np.cumsum(sizes)])[::WINDOW_BLOCKS]
        self._window_starts = np.append(ends, num_rows) if ends[-1] != num_rows else ends
        self._window = lru_cache(maxsize=2)(self._make_window)

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        """Positions in the view of the samples start..stop of the epoch, int64 (stop - start,)."""
        stop = min(stop, self.num_rows)
        if not self._shuffle or start >= stop:
            return np.arange(start, max(start, stop), dtype=np.int64)
        first = int(np.searchsorted(self._window_starts, start, side="right")) - 1
        pieces = []
        for window in range(first, len(self._window_starts) - 1):
            begin = int(self._window_starts[window])
            if begin >= stop:
                break
            pieces.append(self._window(window)[max(0, start - begin) : stop - begin])
        return np.concatenate(pieces)

    def _make_window(self, window: int) -> NDArray[np.int64]:
        blocks = self._blocks[window * WINDOW_BLOCKS : (window + 1) * WINDOW_BLOCKS]
        rows = (blocks[:, None] * BLOCK_ROWS + np.arange(BLOCK_ROWS)).ravel()
        rows = rows[rows < self.num_rows]
        return rows[self._permutation(len(rows), _ROW_STREAM, window)]

    def _permutation(self, size: int, stream: int, window: int) -> NDArray[np.int64]:
        raw = random_numbers(size, seed=self._seed, epoch=self._epoch, stream=stream, window=window)
        return np.argsort(raw, kind="stable")


def random_numbers(size: int, *, seed: int, epoch: int, stream: int, window: int = 0) -> NDArray[np.uint64]:
    """Uniform uint64 (size,) out of Philox, whose stream NumPy guarantees, keyed by (seed, epoch).

    Streams and windows do not overlap: the low counter words count the numbers drawn, the high ones separate.
    """
    key = np.array([seed % 2**64, epoch % 2**64], dtype=np.uint64)
    counter = np.array([0, 0, window, stream], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(size)


def rank_bounds(num_rows: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Share of one rank in a global batch of num_rows: contiguous, sizes differ by at most one.

    Returns:
        (start, stop); over all ranks these shares cover the batch once, in order.
    """
    return num_rows * rank // world_size, num_rows * (rank + 1) // world_size
