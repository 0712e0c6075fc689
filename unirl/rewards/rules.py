"""Rewards that need no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unirl.types import Sample, Scores

__all__ = ["ExactMatch"]


class ExactMatch:
    """1 where the caption is the true caption, word for word, else 0. Only blanks between words are forgiven.

    Of use in direction "text"; in direction "image" caption and target are the same words, and all score 1.
    """

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Score B samples, in their order; never NaN."""
        total = np.array([sample.caption.split() == sample.target.split() for sample in samples], np.float64)
        return Scores(total=total, components={"exact_match": total.copy()})
