from __future__ import annotations

import pytest
import torch

from unirl.algorithms import mean_metrics, value_loss
from unirl.errors import ConfigError

VALUES = torch.tensor([[1.0, 2.0, 0.0]])
OLD = torch.tensor([[1.0, 1.0, 0.0]])
RETURNS = torch.tensor([[0.0, 2.5, 9.0]])
MASK = torch.tensor([[True, True, False]])


def test_worked_by_hand() -> None:
    """Errors 1 and 0.25; the second value clipped to 1.2 has error 1.69, the larger."""
    loss, metrics = value_loss(VALUES, OLD, RETURNS, MASK, clip=0.2, denominator=2.0)
    assert loss.item() == pytest.approx((1.0 + 1.69) / 4)
    assert mean_metrics(metrics) == pytest.approx(
        {
            "value/tokens": 2.0,
            "value/loss": (1.0 + 1.69) / 4,
            "value/clip_fraction": 0.5,
            "value/prediction": 1.5,
            "value/return": 1.25,
        },
        abs=1e-6,
    )
    assert value_loss(VALUES, OLD, RETURNS, MASK, clip=None, denominator=2.0)[0].item() == 1.25 / 4


@pytest.mark.parametrize("clip", [0.0, -0.2, torch.inf, torch.nan])
def test_a_clip_that_is_not_above_zero_is_refused(clip: float) -> None:
    with pytest.raises(ConfigError, match="value clip"):
        value_loss(VALUES, OLD, RETURNS, MASK, clip=clip, denominator=1.0)
