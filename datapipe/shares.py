"""Exact shares: how many of the first n samples each source has, for any n, without counting up to n."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["FAR", "Shares"]

FAR: Final = 2**40
"""Samples; no run gets there, and count x denominator stays below 2^63."""
_MAX_DENOMINATOR: Final = 10**6


class Shares:
    """Deals samples to sources in turn, by weight.

    Sources are split into two halves again and again. A half with share a / b of its parent has
    floor((n a + b / 2) / b) of the parent's first n samples, so that in any stretch it is off by less than 1;
    over all halvings a source is off by less than ceil(log2(sources)).
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Args:
        weights: Above 0, any sum, read as decimals. Ratios of up to 1,000,000 are kept exactly.
        """
        self._weights = [Fraction(str(weight)) for weight in weights]

    def counts(self, num_samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of the first n samples those of each source: int64 (n,), 0..FAR, to int64 (sources, n)."""
        counts = np.empty((len(self._weights), len(num_samples)), np.int64)
        self._deal(counts, num_samples, 0, len(self._weights))
        return counts

    def first_with(self, source: int, count: int) -> int:
        """The fewest samples of which a source has `count`; FAR if it does not have them before."""
        low, high = 0, FAR
        while low < high:
            middle = (low + high) // 2
            if self.counts(np.array([middle]))[source, 0] < count:
                low = middle + 1
            else:
                high = middle
        return low

    def _deal(self, counts: NDArray[np.int64], num_samples: NDArray[np.int64], low: int, high: int) -> None:
        if high - low == 1:
            counts[low] = num_samples
            return
        middle = (low + high) // 2
        share = sum(self._weights[low:middle], Fraction(0)) / sum(self._weights[low:high], Fraction(0))
        share = share.limit_denominator(_MAX_DENOMINATOR)
        left = (num_samples * share.numerator + share.denominator // 2) // share.denominator
        self._deal(counts, left, low, middle)
        self._deal(counts, num_samples - left, middle, high)
