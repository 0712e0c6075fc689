"""Samples without a score: why, how many, and when it is too many."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unirl.errors import RewardError
from unirl.types import Sample

__all__ = ["Problem", "account"]

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
        max_failed_fraction: Share of the samples that may go without a score.

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
    if len(problems) > max_failed_fraction * len(samples):
        raise RewardError(f"{message}; the budget is {max_failed_fraction:.0%} of a call")
    logger.warning(message)
