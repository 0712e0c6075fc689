"""Whether a run, or an engine beside it on the GPU, holds more memory after each step."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

__all__ = ["memory_growth"]


def memory_growth(held_bytes: Sequence[float]) -> float:
    """Bytes by which held memory grows over these steps; 0 or less if it does not.

        (n - 1) min(median slope of the first half, median slope of the second half)

    A leak grows in both halves. A buffer that is made once, however large, lies in one of them, and the
    median over all pairs of steps passes over single ones.

    Args:
        held_bytes: At the end of each of n steps, oldest first; 4 or more.

    Source: the slope is that of Theil and Sen.
    """
    half = len(held_bytes) // 2
    return (len(held_bytes) - 1) * min(_slope(held_bytes[:half]), _slope(held_bytes[half:]))


def _slope(values: Sequence[float]) -> float:
    steps = range(len(values))
    return median((values[j] - values[i]) / (j - i) for i in steps for j in steps[i + 1 :])
