from __future__ import annotations

import math

import pytest
import torch

from unirl.algorithms import drpo_loss, gspo_loss, mean_metrics, policy_loss, sequence_mean_weights
from unirl.errors import ConfigError

ONE = torch.ones(1, 1, dtype=torch.bool)


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.6, 0.0),  # above 1 + 0.3: no more reward for rising
        (0.5, 2.0, -1.0, -1.0),  # below 1 - 0.2, but a good token is always pulled back
        (0.5, -2.0, 1.6, 0.0),  # below 1 - 0.2: no more reward for falling
        (1.5, -2.0, 3.0, 3.0),
        (4.0, -2.0, 6.0, 0.0),  # dual clip at 3
    ],
)
def test_ppo_worked_by_hand(ratio: float, advantage: float, loss: float, slope: float) -> None:
    """The slope is d loss / d logprob = d loss / d ratio * ratio."""
    logprobs = row(math.log(ratio)).requires_grad_()
    result, _ = policy_loss(
        logprobs, row(0.0), row(advantage), ONE, clip_low=0.2, clip_high=0.3, denominator=1.0, dual_clip=3.0
    )
    result.backward()
    assert result.item() == pytest.approx(loss)
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(slope)


def test_metrics_worked_by_hand() -> None:
    """Ratios 1, 2, 1/2 with A = 1, 1, -1; the last token is masked."""
    logprobs = torch.log(row(1.0, 2.0, 0.5, 9.0))
    mask = torch.tensor([[True, True, True, False]])
    _, metrics = policy_loss(
        logprobs, row(0, 0, 0, 0), row(1, 1, -1, 1), mask, clip_low=0.2, clip_high=0.2, denominator=3.0
    )
    k3 = [0.0, 0.5 - 1 + math.log(2), 2 - 1 - math.log(2)]
    assert mean_metrics(metrics) == pytest.approx(
        {
            "policy/tokens": 3.0,
            "policy/loss": (-1.0 - 1.2 + 0.8) / 3,
            "policy/clip_fraction": 2 / 3,
            "policy/dual_clip_fraction": 0.0,
            "policy/ratio": 3.5 / 3,
            "policy/ratio_max": 2.0,
            "policy/ratio_min": 0.5,
            "policy/kl_old": sum(k3) / 3,
        }
    )


def test_a_log_ratio_far_off_stays_finite() -> None:
    logprobs = row(0.0, -500.0).requires_grad_()
    loss, metrics = policy_loss(
        logprobs,
        row(-500.0, 0.0),
        row(-1.0, -1.0),
        torch.ones(1, 2, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.2,
        denominator=2.0,
    )
    loss.backward()
    assert loss.item() == pytest.approx((math.exp(20) + 0.8) / 2)
    assert metrics["policy/ratio_max"].item() == pytest.approx(math.exp(20))
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()


def test_weights_scale_tokens() -> None:
    arguments = (row(-1.0, -1.0), row(-1.0, -1.0), row(1.0, 3.0), torch.ones(1, 2, dtype=torch.bool))
    loss, _ = policy_loss(*arguments, clip_low=0.2, clip_high=0.2, denominator=2.0, weights_BT=row(0.5, 2.0))
    assert loss.item() == pytest.approx(-(0.5 * 1 + 2 * 3) / 2)


def test_gspo_worked_by_hand() -> None:
    """Log-ratios 0.3 and -0.1 have the mean 0.1: s = exp(0.1), inside the clip; a masked token stays out."""
    logprobs = row(0.3, -0.1, 7.0).requires_grad_()
    mask = torch.tensor([[True, True, False]])
    loss, metrics = gspo_loss(
        logprobs,
        row(0, 0, 0),
        row(2, 2, 2),
        mask,
        clip_low=0.2,
        clip_high=0.2,
        denominator=1.0,
        weights_BT=sequence_mean_weights(mask),
    )
    loss.backward()
    assert loss.item() == pytest.approx(-2 * math.exp(0.1))
    expected = -math.exp(0.1)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [pytest.approx([expected, expected, 0.0])]
    assert metrics["policy/ratio_max"].item() == pytest.approx(math.exp(0.1))


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("shift", [-0.2, -0.1, 0.0, 0.05, 0.1, 0.2])
def test_drpo_weight_falls_with_the_shift_and_turns(advantage: float, shift: float) -> None:
    """mu = 1/2, epsilon = 0.1: slope -A ratio (1 - sign(A) shift / epsilon), 0 at a shift of epsilon."""
    logprobs = row(math.log(0.5 + shift)).requires_grad_()
    loss, metrics = drpo_loss(logprobs, row(math.log(0.5)), row(advantage), ONE, epsilon=0.1, denominator=1.0)
    loss.backward()
    ratio = (0.5 + shift) / 0.5
    sign = math.copysign(1.0, advantage)
    assert loss.item() == pytest.approx(-advantage * ratio + 2 * 0.5 * (ratio - 1) ** 2 / 0.2)
    slope = -advantage * ratio * (1 - sign * shift / 0.1)
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(slope, abs=1e-12)
    if sign * shift > 0.11:
        assert metrics["policy/clip_fraction_sum"].item() == 1


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({"clip_low": -0.1, "clip_high": 0.2}, "clip_low is -0.1"),
        ({"clip_low": 1.1, "clip_high": 0.2}, "clip_low is 1.1"),
        ({"clip_low": 0.2, "clip_high": -0.2}, "clip_high is -0.2"),
        ({"clip_low": math.nan, "clip_high": 0.2}, "clip_low is nan"),
        ({"clip_low": 0.2, "clip_high": math.inf}, "clip_high is inf"),
        ({"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.0}, "dual_clip is 1.0"),
    ],
)
def test_bounds_that_are_no_bounds_are_refused(bounds: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        policy_loss(row(0.0), row(0.0), row(0.0), ONE, denominator=1.0, **bounds)


def test_drpo_needs_a_shift() -> None:
    with pytest.raises(ConfigError, match="epsilon is 0"):
        drpo_loss(row(0.0), row(0.0), row(0.0), ONE, epsilon=0, denominator=1.0)
