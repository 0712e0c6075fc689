"""How far an order is from that of the store: two numbers to judge a shuffle by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["OrderQuality", "order_quality"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderQuality:
    """For a uniform permutation of n rows the expected values are 1/3 and 2/n."""

    mean_displacement: float  # mean distance between index and position, as a share of the epoch
    adjacent_fraction: float  # share of neighbours in the order that are neighbours in the view


def order_quality(order: NDArray[np.int64]) -> OrderQuality:
    """Judge a permutation of 0..n, int64 (n,); n of 0 or 1 gives zeros."""
    num_rows = len(order)
    if num_rows < 2:
        return OrderQuality(mean_displacement=0.0, adjacent_fraction=0.0)
    return OrderQuality(
        mean_displacement=float(np.abs(order - np.arange(num_rows)).mean() / num_rows),
        adjacent_fraction=float((np.abs(np.diff(order)) == 1).mean()),
    )
