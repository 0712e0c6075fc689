from __future__ import annotations

import pytest

from unirl.algorithms import learning_rate_factor
from unirl.algorithms.schedule import Decay
from unirl.errors import ConfigError


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.5]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.5]),
    ],
)
def test_worked_by_hand(decay: Decay, expected: list[float]) -> None:
    """Four steps of warm-up, then down to 1/2 between steps 4 and 8; looked at 0..4, 6, 8, 100."""
    factors = [
        learning_rate_factor(step, warmup_steps=4, total_steps=8, decay=decay, floor=0.5)
        for step in (0, 1, 2, 3, 4, 6, 8, 100)
    ]
    assert factors == pytest.approx(expected)


def test_no_warmup_and_no_decay_steps() -> None:
    assert learning_rate_factor(0, warmup_steps=0, total_steps=10) == 1.0
    assert learning_rate_factor(5, warmup_steps=5, total_steps=5, decay="linear") == 1.0
    assert learning_rate_factor(6, warmup_steps=5, total_steps=5, decay="linear") == 0.0


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="total_steps 2"):
        learning_rate_factor(0, warmup_steps=3, total_steps=2)
    with pytest.raises(ConfigError, match=r"floor is 1\.5"):
        learning_rate_factor(0, warmup_steps=0, total_steps=2, floor=1.5)
    with pytest.raises(ConfigError, match="'square'; choose one of constant, linear, cosine"):
        learning_rate_factor(0, warmup_steps=3, total_steps=9, decay="square")  # type: ignore[arg-type]
