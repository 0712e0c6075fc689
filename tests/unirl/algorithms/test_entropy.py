from __future__ import annotations

import math

import pytest

from unirl.algorithms import AdaptiveEntropy
from unirl.errors import ConfigError


def test_by_hand() -> None:
    """Below the target the weight grows and counts; above it shrinks and does not; it is never negative."""
    weight = AdaptiveEntropy(value=0.0, target=2.0, step=0.005)
    seen = []
    for entropy in (1.5, 1.9, 2.0, 2.5, 1.0, 3.0, 3.0, 3.0):
        seen.append((weight.coefficient(entropy), round(weight.update(entropy).value, 6)))
        weight = weight.update(entropy)
    assert seen == [
        (0.0, 0.005),
        (0.005, 0.01),
        (0.01, 0.01),
        (0.0, 0.005),
        (0.005, 0.01),
        (0.0, 0.005),
        (0.0, 0.0),
        (0.0, 0.0),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": -0.1}, "coefficient is -0.1"),
        ({"target": 0.0}, "target is 0.0"),
        ({"step": math.inf}, "step is inf"),
    ],
)
def test_what_cannot_work(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdaptiveEntropy(**({"value": 0.1, "target": 1.0, "step": 0.1} | changes))


def test_entropy_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="measured entropy is nan"):
        AdaptiveEntropy(value=0.1, target=1.0, step=0.1).update(math.nan)
