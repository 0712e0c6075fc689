from __future__ import annotations

import numpy as np

from unirl.rewards import ExactMatch
from unirl.types import Sample

PICTURE = np.zeros((4, 4, 3), np.uint8)


def sample(caption: str, target: str) -> Sample:
    return Sample(key="k", direction="text", caption=caption, image=PICTURE, target=target)


def test_only_the_words_in_their_order_match() -> None:
    given = [
        sample("a red circle", "a red circle"),
        sample("  a red   circle ", "a red circle"),
        sample("a circle red", "a red circle"),
        sample("a red circle circle", "a red circle"),
        sample("A red circle", "a red circle"),
        sample("", "a red circle"),
    ]
    scores = ExactMatch().score(given)
    np.testing.assert_array_equal(scores.total, [1, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(scores.components["exact_match"], scores.total)
