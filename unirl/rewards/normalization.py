"""Scores of different rewards on one scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import rankdata

__all__ = ["Normalization", "RunningMoments", "normalized"]

Normalization = Literal["none", "running", "group", "rank"]
SMALLEST_DEVIATION = 1e-6
"""Relative to the size of the scores: below it, they are equal but for rounding."""


@dataclass(slots=True)
class RunningMoments:
    """Count, mean and sum of squared differences from the mean, of everything added so far.

    Source: Chan, Golub and LeVeque 1983, Algorithms for Computing the Sample Variance, equation 2.1.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: np.ndarray) -> None:
        """Take in float (B,); NaN is left out."""
        known = values[~np.isnan(values)]
        if not len(known):
            return
        count, mean = len(known), float(known.mean())
        both, difference = self.count + count, mean - self.mean
        self.squares += float(((known - mean) ** 2).sum()) + difference**2 * self.count * count / both
        self.mean += difference * count / both
        self.count = both

    @property
    def deviation(self) -> float:
        """Of the population; 1 before there are two values, and where all are equal."""
        deviation = math.sqrt(self.squares / self.count) if self.count > 1 else 0.0
        return deviation if deviation > _floor(self.mean) else 1.0


def normalized(
    values: np.ndarray, how: Normalization, keys: Sequence[str], moments: RunningMoments | None = None
) -> np.ndarray:
    """Bring the scores of one reward to a common scale.

    Args:
        values: Float64 (B,), NaN where there is no score; it stays NaN and leaves all statistics.
        how: "none"; "running": (v - mean) / deviation of `moments`, unchanged while these are empty; "group":
            the same over the values of one key, 0 for a group of one or of equal values; "rank": the place
            among them from 0 to 1, equal values share their mean place, 0.5 for a group of one.
        keys: B keys; equal ones are a group.
        moments: Of "running".
    """
    if how == "none" or (how == "running" and (moments is None or not moments.count)):
        return values
    if how == "running" and moments is not None:
        return (values - moments.mean) / moments.deviation
    scaled = np.full(len(values), np.nan)
    groups: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        if not math.isnan(values[row]):
            groups.setdefault(key, []).append(row)
    for rows in groups.values():
        inside = values[rows]
        scaled[rows] = _ranks(inside) if how == "rank" else _standard(inside)
    return scaled


def _standard(values: np.ndarray) -> np.ndarray:
    deviation = float(values.std())
    if deviation <= _floor(float(np.abs(values).max())):
        return np.zeros(len(values))
    scaled: np.ndarray = (values - values.mean()) / deviation
    return scaled


def _ranks(values: np.ndarray) -> np.ndarray:
    if len(values) == 1:
        return np.full(1, 0.5)
    ranks: np.ndarray = (rankdata(values) - 1) / (len(values) - 1)
    return ranks


def _floor(size: float) -> float:
    return SMALLEST_DEVIATION * max(1.0, abs(size))
