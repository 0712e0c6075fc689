"""Samples without a score: why, how many, and when it is too many."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unirl.errors import RewardError
from unirl.types import Sample

__all__ = ["Problem", "account", "is_over_budget"]

logger = logging.getLogger("unirl.rewards")

NUM_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why one sample has no score."""

    reason: str
    """A word or two to count by, such as "too long"."""
    text: str
    """A sentence to read."""


def account(
    counts: Counter[str],
    samples: Sequence[Sample],
    problems: Mapping[int, Problem],
    *,
    reward: str,
    max_failed_fraction: float,
) -> None:
    """Count the samples of one call that have no score, name them in the log, and stop if they are too many.

    Args:
        counts: Samples without a score since the start, by reason; added to.
        samples: All samples of the call.
        problems: Position in the call -> why.
        reward: What is scoring, for messages.
        max_failed_fraction: Share of the samples that may go without a score; see `is_over_budget`.

    Raises:
        RewardError: If more than that share went without.
    """
    if not problems:
        return
    counts.update(problem.reason for problem in problems.values())
    named = [
        f"sample {row} ({samples[row].key}): {problem.text}"
        for row, problem in sorted(problems.items())[:NUM_NAMED]
    ]
    message = f"{reward}: {len(problems)} of {len(samples)} samples could not be scored: " + "; ".join(named)
    if is_over_budget(len(problems), len(samples), max_failed_fraction):
        raise RewardError(f"{message}; the budget is {max_failed_fraction:.0%} of a call")
    logger.warning(message)


def is_over_budget(num_failed: int, num: int, max_failed_fraction: float) -> bool:
    """Say whether more than a share failed. One alone among several is forgiven, unless the share is 0."""
    is_single = num_failed == 1 < num and max_failed_fraction > 0
    return num_failed > max_failed_fraction * num and not is_single
