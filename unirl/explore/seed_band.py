"""Several runs as one curve: the mean of their values at each step, and how far they lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["SeedBand", "seed_band"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedBand:
    """Float64 arrays of one length, over the steps at which some run has a number."""

    steps: np.ndarray
    low: np.ndarray
    """Smallest value of any run; NaN where none has one."""
    mean: np.ndarray
    high: np.ndarray


def seed_band(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> SeedBand:
    """Join curves, each a pair of steps and values of one length, step by step.

    A run that has no finite value at a step is left out there, so that runs may end at different
    steps. Several values of one run at one step count by their last.
    """
    steps = np.unique(np.concatenate([found for found, _ in curves])) if curves else np.zeros(0)
    steps = steps[np.isfinite(steps)]
    values = np.full((len(curves), len(steps)), np.nan)
    for row, (found, numbers) in zip(values, curves):
        kept = np.isfinite(found)
        row[np.searchsorted(steps, found[kept])] = numbers[kept]
    known = np.isfinite(values)
    count = known.sum(axis=0)
    total = np.where(known, values, 0).sum(axis=0)
    empty = count == 0
    return SeedBand(
        steps=steps,
        low=np.where(empty, np.nan, np.where(known, values, np.inf).min(axis=0, initial=np.inf)),
        mean=np.where(empty, np.nan, total / np.maximum(count, 1)),
        high=np.where(empty, np.nan, np.where(known, values, -np.inf).max(axis=0, initial=-np.inf)),
    )
