"""Scoring with a network in this process: what cannot be scored is left out, the rest goes in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from unirl.rewards.failures import Problem
from unirl.types import Sample

__all__ = ["score_in_batches"]


def score_in_batches(
    samples: Sequence[Sample],
    lengths: Sequence[int],
    *,
    problem_of: Callable[[Sample, int], Problem | None],
    score: Callable[[Sequence[Sample]], np.ndarray],
    batch_size: int,
) -> tuple[np.ndarray, dict[int, Problem]]:
    """Score samples of about the same length together.

    Args:
        samples: B samples.
        lengths: Tokens of each caption.
        problem_of: Why a sample of this length cannot be scored, or None.
        score: Float scores of the samples of one batch, in their order.
        batch_size: Most samples in a batch.

    Returns:
        float64 (B,), NaN where there is no finite number, and the reasons by position.
    """
    problems = {
        row: problem
        for row, (sample, length) in enumerate(zip(samples, lengths, strict=True))
        if (problem := problem_of(sample, length)) is not None
    }
    order = sorted(set(range(len(samples))) - problems.keys(), key=lambda row: (lengths[row], row))
    total = np.full(len(samples), np.nan)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        total[batch] = score([samples[row] for row in batch])
    for row in order:
        if not np.isfinite(total[row]):
            problems[row] = Problem(reason="not finite", text="the model gave no finite number")
            total[row] = np.nan
    return total, problems
