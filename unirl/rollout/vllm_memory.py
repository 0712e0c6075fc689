"""Whether an engine that sleeps between rollouts gives back less memory each time."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

__all__ = ["memory_alarm"]

MIN_STEPS = 6
"""Fewer say nothing about a trend."""


def memory_alarm(free_bytes: Sequence[float], *, max_growth_bytes: float = 200e6) -> str | None:
    """Say that an engine leaks, before it runs out of memory.

    The trend is the median of the slopes between all pairs of steps, so that single steps do not count.

    Args:
        free_bytes: Free memory of the GPU at each step, measured while the engine sleeps, oldest first.
        max_growth_bytes: What may be lost over all these steps together.

    Returns:
        One sentence with the loss and the steps that are left; None if all is well.
    """
    steps = len(free_bytes)
    if steps < MIN_STEPS:
        return None
    slope = median(
        (free_bytes[j] - free_bytes[i]) / (j - i) for i in range(steps) for j in range(i + 1, steps)
    )
    lost = -slope * (steps - 1)
    if lost <= max_growth_bytes:
        return None
    return (
        f"the sleeping engine keeps {lost / 1e6:.0f} MB more than {steps - 1} steps ago, allowed are "
        f"{max_growth_bytes / 1e6:.0f} MB; at this pace {free_bytes[-1] / 1e6:.0f} MB are gone in "
        f"{free_bytes[-1] / -slope:.0f} steps. Restart the engine; a sync gives it its weights back"
    )
