"""The algorithms against verl 0.9.1 itself, on random batches. `make oracle` installs it and runs this."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unirl.algorithms import (
    AdaptiveKL,
    discounted_returns,
    dr_grpo_advantages,
    gae,
    group_advantages,
    gspo_loss,
    kl_loss,
    policy_loss,
    rloo_advantages,
    sequence_mean_weights,
    truncated_importance_weights,
    value_loss,
    whiten,
)

verl = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed; run `make oracle`")

TOLERANCE = 1e-6
"""verl adds 1e-8 to counts and deviations."""


class Batch:
    """Random log-probs, advantages and values of 6 rows of 1 to 8 tokens, float64."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(scale: float = 1.0) -> Tensor:
            return torch.randn(6, 8, generator=generator, dtype=torch.float64) * scale

        self.old = -normal().abs()
        self.logprobs, self.reference = self.old + normal(0.4), self.old + normal(0.4)
        self.advantages, self.rewards = normal(), normal()
        self.values, self.old_values, self.returns = normal(), normal(), normal()
        lengths = torch.randint(1, 9, (6, 1), generator=generator)
        self.mask = torch.arange(8) < lengths
        self.scores = torch.randn(6, generator=generator, dtype=torch.float64)


@pytest.fixture(params=range(5))
def batch(request: pytest.FixtureRequest) -> Batch:
    return Batch(request.param)


class Config(verl.ActorConfig):  # type: ignore[misc, name-defined]
    """What the policy losses read of a configuration whose own constructor asks for a whole trainer."""

    def __init__(self, low: float = 0.2, high: float = 0.2, dual_clip: float = 1e9) -> None:
        values = {
            "clip_ratio": low,
            "clip_ratio_low": low,
            "clip_ratio_high": high,
            "clip_ratio_c": dual_clip,
        }
        for name, value in {**values, "global_batch_info": {}}.items():
            object.__setattr__(self, name, value)


def same_value_and_gradient(
    ours: Callable[[Tensor], Tensor], peers: Callable[[Tensor], Tensor], at: Tensor
) -> None:
    results = []
    for loss in (ours, peers):
        point = at.clone().requires_grad_()
        value = loss(point)
        (gradient,) = torch.autograd.grad(value, point)
        results.append((value.detach(), gradient))
    torch.testing.assert_close(results[0][0], results[1][0], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(results[0][1], results[1][1], atol=TOLERANCE, rtol=0)


def test_gae(batch: Batch) -> None:
    mask = batch.mask
    advantages, returns = gae(batch.rewards, batch.values, mask, gamma=0.97, lam=0.9)
    expected, expected_returns = verl.compute_gae_advantage_return(
        batch.rewards, batch.values, mask.double(), 0.97, 0.9
    )
    torch.testing.assert_close(whiten(advantages, mask), expected * mask, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(returns[mask], expected_returns[mask], atol=TOLERANCE, rtol=0)


def test_advantages_of_groups(batch: Batch) -> None:
    groups = np.array([0, 0, 0, 1, 1, 1])
    token_scores, ones = batch.scores.unsqueeze(1), torch.ones(6, 1, dtype=torch.float64)
    ours = [
        f(batch.scores.view(2, 3)).flatten() for f in (group_advantages, dr_grpo_advantages, rloo_advantages)
    ]
    theirs = [
        verl.compute_grpo_outcome_advantage(token_scores, ones, groups),
        verl.compute_grpo_outcome_advantage(token_scores, ones, groups, norm_adv_by_std_in_grpo=False),
        verl.compute_rloo_outcome_advantage(token_scores, ones, groups),
    ]
    for mine, (advantages, _) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, advantages.squeeze(1), atol=1e-5, rtol=0)


def test_reinforce_plus_plus(batch: Batch) -> None:
    mask = batch.mask
    expected, returns = verl.compute_reinforce_plus_plus_outcome_advantage(
        batch.rewards * mask, mask.double(), config=SimpleNamespace(gamma=0.97)
    )
    mine = discounted_returns(batch.rewards, mask, gamma=0.97)
    torch.testing.assert_close(mine[mask], returns[mask], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(whiten(mine, mask), expected * mask, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("low", "high", "dual_clip"), [(0.2, 0.2, None), (0.2, 0.28, None), (0.2, 0.3, 1.5)])
@pytest.mark.parametrize("average", ["token-mean", "seq-mean-token-mean"])
def test_policy_loss(batch: Batch, low: float, high: float, dual_clip: float | None, average: str) -> None:
    by_token = average == "token-mean"
    same_value_and_gradient(
        lambda x: policy_loss(
            x,
            batch.old,
            batch.advantages,
            batch.mask,
            clip_low=low,
            clip_high=high,
            dual_clip=dual_clip,
            denominator=float(batch.mask.sum()) if by_token else 6.0,
            weights_BT=None if by_token else sequence_mean_weights(batch.mask),
        )[0],
        lambda x: verl.compute_policy_loss_vanilla(
            batch.old, x, batch.advantages, batch.mask.double(), average, Config(low, high, dual_clip or 1e9)
        )[0],
        batch.logprobs,
    )


def test_gspo(batch: Batch) -> None:
    same_value_and_gradient(
        lambda x: gspo_loss(
            x,
            batch.old,
            batch.advantages,
            batch.mask,
            clip_low=0.1,
            clip_high=0.15,
            denominator=6.0,
            weights_BT=sequence_mean_weights(batch.mask),
        )[0],
        lambda x: verl.compute_policy_loss_gspo(
            batch.old, x, batch.advantages, batch.mask.double(), "seq-mean-token-mean", Config(0.1, 0.15)
        )[0],
        batch.logprobs,
    )


def test_value_loss(batch: Batch) -> None:
    same_value_and_gradient(
        lambda x: value_loss(
            x, batch.old_values, batch.returns, batch.mask, clip=0.2, denominator=float(batch.mask.sum())
        )[0],
        lambda x: verl.compute_value_loss(x, batch.returns, batch.old_values, batch.mask.double(), 0.2)[0],
        batch.values,
    )


@pytest.mark.parametrize(
    ("name", "estimator", "from_k2"),
    [("k1", "k1", False), ("k2", "k2", False), ("k3", "k3", False), ("k3+", "k3", True)],
)
def test_kl_loss(batch: Batch, name: str, estimator: str, from_k2: bool) -> None:
    count = float(batch.mask.sum())
    same_value_and_gradient(
        lambda x: kl_loss(
            x, batch.reference, batch.mask, estimator=estimator, denominator=count, gradient_from_k2=from_k2
        )[0],
        lambda x: (verl.kl_penalty(x, batch.reference, name) * batch.mask).sum() / count,
        batch.logprobs,
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights(batch: Batch, level: Any) -> None:
    correction = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    expected = correction.compute_rollout_correction_weights(
        batch.logprobs - batch.old, batch.mask.double(), level, 1.5
    )[0]
    mine = truncated_importance_weights(batch.logprobs, batch.old, batch.mask, limit=1.5, level=level)
    torch.testing.assert_close(mine, expected * batch.mask, atol=TOLERANCE, rtol=0)


def test_adaptive_kl() -> None:
    peer, mine = (
        verl.AdaptiveKLController(0.2, 6.0, 10_000),
        AdaptiveKL(value=0.2, target=6.0, horizon=10_000),
    )
    for kl in (8.0, 5.9, 1.0, -3.0, 6.5):
        peer.update(kl, 256)
        mine = mine.update(kl, 256)
        assert mine.value == pytest.approx(float(peer.value), abs=1e-12)
