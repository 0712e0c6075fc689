"""Presentation times of a video as the decoder gave them, made fit to name frames."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

__all__ = ["header_step", "increasing_times", "is_uneven"]


def header_step(fps: float, time_base: Fraction) -> int:
    """Units of time_base from one frame to the next at the rate of the header; 1 when it claims none."""
    return max(1, round(1 / (Fraction(fps).limit_denominator(10**6) * time_base))) if fps else 1


def increasing_times(times: list[int | None], step: int) -> tuple[NDArray[np.int64], bool]:
    """Times as they are when each is later than the one before. The few that are not, as where two pieces
    of an edit list meet, are put one tick after it; many of them, or missing ones, give an even grid."""
    order = np.arange(len(times), dtype=np.int64)
    known = np.array([time for time in times if time is not None], dtype=np.int64)
    if len(known) == len(times):
        num_wrong = int((np.diff(known) <= 0).sum())
        if num_wrong <= len(times) // 10:
            return np.maximum.accumulate(known - order) + order, num_wrong > 0
    start = int(known[0]) if len(known) else 0
    return start + step * order, True


def is_uneven(pts: NDArray[np.int64], mean_step: float) -> bool:
    """Whether some frame lies off the even grid by more than its rounding and a tenth of a step."""
    grid = pts[0] + mean_step * np.arange(len(pts))
    return bool(np.abs(pts - grid).max() > max(1.0, 0.1 * mean_step))
