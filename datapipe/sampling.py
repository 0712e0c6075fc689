"""Orders by name: a full permutation, drawing with replacement, epochs of a fixed length."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from datapipe.errors import LoaderError
from datapipe.order import EpochOrder, Positions, random_numbers
from datapipe.whole_numbers import whole_number

__all__ = ["FixedLength", "FullShuffle", "Passes", "WithReplacement"]

_PERMUTATION_STREAM: Final = 2
_DRAW_STREAM: Final = 3
_DRAW_WINDOW: Final = 4096
_SMALLEST_WEIGHT, _LARGEST_WEIGHT = 1e-280, 1e280  # of what is summed as it is


@dataclass(frozen=True, slots=True)
class FullShuffle:
    """Every row once, in a uniform permutation of the whole view.

    Costs 16 bytes of memory per row, and each sample is read from a place of its own. Up to 16,384 rows the
    block shuffle is as good.
    """

    def num_samples(self, num_rows: int) -> int:
        return num_rows

    def positions(self, num_rows: int, *, seed: int, epoch: int) -> Positions:
        raw = random_numbers(num_rows, seed=seed, epoch=epoch, stream=_PERMUTATION_STREAM)
        return _Listed(np.argsort(raw, kind="stable"))

    def fingerprint(self) -> int:
        return zlib.crc32(b"full shuffle")


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Epochs of num_samples, cut out of one pass over the view after the other.

    A row comes again only when every other one has come as often. An epoch of the loader may hold a part of a
    pass or several passes.
    """

    length: int  # samples of an epoch, 1 or more

    def __post_init__(self) -> None:
        whole_number("the length of an epoch", self.length, 1)

    def num_samples(self, num_rows: int) -> int:
        return self.length if num_rows else 0

    def positions(self, num_rows: int, *, seed: int, epoch: int) -> Positions:
        return _Stretch(Passes(num_rows, seed=seed), epoch * self.length, self.num_samples(num_rows))

    def fingerprint(self) -> int:
        return zlib.crc32(f"fixed length {self.length}".encode())


class WithReplacement:
    """Independent draws: an epoch repeats some rows and misses others."""

    def __init__(self, *, length: int | None = None, weights: ArrayLike | None = None) -> None:
        """Args:
        length: Samples of an epoch; None for as many as the view has rows.
        weights: Float (rows of the view,), 0 or more, any sum; None for equal ones.

        Raises:
            LoaderError: For weights that are negative, not finite or all zero.
        """
        self._length = None if length is None else whole_number("the length of an epoch", length, 1)
        self._ends = None if weights is None else _cumulated(weights)

    def num_samples(self, num_rows: int) -> int:
        return num_rows if self._length is None or not num_rows else self._length

    def positions(self, num_rows: int, *, seed: int, epoch: int) -> Positions:
        if self._ends is not None and len(self._ends) != num_rows:
            raise LoaderError(f"there are {len(self._ends)} weights for a view of {num_rows} rows")
        ends = np.arange(1, num_rows + 1, dtype=np.float64) if self._ends is None else self._ends
        return _Draws(ends, self.num_samples(num_rows), seed, epoch)

    def fingerprint(self) -> int:
        weights = b"equal" if self._ends is None else self._ends.tobytes()
        return zlib.crc32(weights, zlib.crc32(f"with replacement {self._length}".encode()))


class Passes:
    """One block-shuffled pass over num_rows after the other, without end; pass p is epoch p of EpochOrder."""

    def __init__(self, num_rows: int, *, seed: int) -> None:
        self.num_rows = num_rows
        self._pass = lru_cache(maxsize=2)(lambda number: EpochOrder(num_rows, seed=seed, epoch=number))

    def pick(self, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions of samples of the endless sequence; int64 (n,) ascending to int64 (n,)."""
        found = np.empty(len(ordinals), np.int64)
        numbers, places = np.divmod(ordinals, self.num_rows)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            wanted = places[mine]
            first = int(wanted[0])
            found[mine] = self._pass(number).take(first, int(wanted[-1]) + 1)[wanted - first]
        return found


@dataclass(frozen=True, slots=True)
class _Stretch:
    passes: Passes
    first: int
    length: int

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        return self.passes.pick(np.arange(self.first + start, self.first + min(stop, self.length)))


@dataclass(frozen=True, slots=True)
class _Listed:
    order: NDArray[np.int64]

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        return self.order[start:stop]


@dataclass(frozen=True, slots=True)
class _Draws:
    ends: NDArray[np.float64]  # running sums of the weights
    length: int
    seed: int
    epoch: int

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        stop = min(stop, self.length)
        first = start // _DRAW_WINDOW
        windows = [self._window(window) for window in range(first, -(-stop // _DRAW_WINDOW))]
        drawn = np.concatenate([np.empty(0, np.int64), *windows])
        wanted: NDArray[np.int64] = drawn[start - first * _DRAW_WINDOW : stop - first * _DRAW_WINDOW]
        return wanted

    def _window(self, window: int) -> NDArray[np.int64]:
        raw = random_numbers(
            _DRAW_WINDOW, seed=self.seed, epoch=self.epoch, stream=_DRAW_STREAM, window=window
        )
        places = (raw >> np.uint64(11)).astype(np.float64) * (self.ends[-1] / 2**53)
        # A product that rounds up to the last sum belongs to the last row that has a weight.
        last = int(np.searchsorted(self.ends, self.ends[-1]))
        found: NDArray[np.int64] = np.minimum(np.searchsorted(self.ends, places, side="right"), last)
        return found


def _cumulated(given: ArrayLike) -> NDArray[np.float64]:
    try:
        weights = np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise LoaderError(f"weights are no list of numbers: {error}") from error
    if weights.ndim != 1 or not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
        raise LoaderError(
            f"weights of shape {weights.shape} are no list of finite numbers of 0 or more that are not all 0"
        )
    largest = float(weights.max())
    if not _SMALLEST_WEIGHT < largest < _LARGEST_WEIGHT:
        # Scaled by a power of two, so that sums neither overflow nor lose their places.
        weights = np.ldexp(weights, -math.frexp(largest)[1])
    return np.cumsum(weights)
