from __future__ import annotations

import math

import pytest
import torch

from unirl.algorithms import (
    discounted_returns,
    kl_penalty_rewards,
    last_valid_index,
    overlong_penalty,
    scored_mask,
    spread_to_tokens,
    truncated_importance_weights,
)
from unirl.errors import ConfigError, ShapeError

MASK = torch.tensor([[True, True, True], [True, True, False], [True, False, True], [False, False, False]])
SCORES = torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_last_valid_index() -> None:
    assert last_valid_index(MASK).tolist() == [2, 1, 2, -1]
    assert last_valid_index(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [-1, -1]


def test_rewards_worked_by_hand() -> None:
    """Every log-prob is 1/2 nat above the reference's: each valid token pays 0.1 * 0.5."""
    logprobs, ref = torch.full((4, 3), -0.5), torch.full((4, 3), -1.0)
    rewards = kl_penalty_rewards(SCORES, logprobs, ref, MASK, kl_coef=0.1)
    expected = [[-0.05, -0.05, 0.95], [-0.05, 1.95, 0], [-0.05, 0, 2.95], [0, 0, 0]]
    torch.testing.assert_close(rewards, torch.tensor(expected))


def test_stray_values_under_the_mask_do_not_enter() -> None:
    stray = torch.where(MASK, -0.5, -torch.inf)
    rewards = kl_penalty_rewards(SCORES, stray, stray, MASK, kl_coef=0.1)
    assert rewards.isfinite().all() and rewards.sum() == 6.0


def test_unscored_rows_leave_the_mask() -> None:
    scores = torch.tensor([1.0, math.nan, 0.0, math.nan])
    mask = scored_mask(MASK, scores)
    assert mask.tolist() == [[True] * 3, [False] * 3, [True, False, True], [False] * 3]
    zeros = torch.zeros(4, 3)
    assert kl_penalty_rewards(scores, zeros, zeros, mask, kl_coef=0.1).sum() == 1.0
    assert kl_penalty_rewards(scores, zeros, zeros, MASK, kl_coef=0.1).isnan().sum() == 1


def test_spread_to_tokens() -> None:
    assert spread_to_tokens(SCORES, MASK).tolist() == [[1, 1, 1], [2, 2, 0], [3, 0, 3], [0, 0, 0]]


def test_discounted_returns_worked_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0, 4.0], [1.0, 2.0, 9.0], [1.0, 9.0, 4.0], [9.0, 9.0, 9.0]])
    returns = discounted_returns(rewards, MASK, gamma=0.5)
    assert returns.tolist() == [[2, 2, 4], [2, 2, 0], [3, 0, 4], [0, 0, 0]]


def test_importance_weights_worked_by_hand() -> None:
    logprobs = torch.log(torch.tensor([[0.2, 0.9, 0.3]]))
    behaviour = torch.log(torch.tensor([[0.4, 0.3, 0.3]]))
    mask = torch.tensor([[True, True, False]])
    weights = truncated_importance_weights(logprobs, behaviour, mask, limit=2.0)
    torch.testing.assert_close(weights, torch.tensor([[0.5, 2.0, 0.0]]))
    weights = truncated_importance_weights(logprobs, behaviour, mask, limit=2.0, level="sequence")
    torch.testing.assert_close(weights, torch.tensor([[1.5, 1.5, 0.0]]))


def test_overlong_penalty_worked_by_hand() -> None:
    lengths = torch.tensor([0, 12, 14, 16, 99])
    assert overlong_penalty(lengths, max_length=16, buffer_length=4).tolist() == [0, 0, -0.5, -1, -1]


def test_refusals() -> None:
    zeros = torch.zeros(4, 3)
    with pytest.raises(ShapeError, match=r"scores_B has shape \(3,\)"):
        kl_penalty_rewards(SCORES[:3], zeros, zeros, MASK, kl_coef=0.1)
    with pytest.raises(ShapeError, match=r"\(4, 3\).*\(4, 2\)"):
        kl_penalty_rewards(SCORES, zeros, zeros[:, :2], MASK, kl_coef=0.1)
    with pytest.raises(ConfigError, match=r"limit is 0\.5"):
        truncated_importance_weights(zeros, zeros, MASK, limit=0.5)
    with pytest.raises(ConfigError, match="buffer_length is 0"):
        overlong_penalty(SCORES, max_length=16, buffer_length=0)
    with pytest.raises(ConfigError, match="overlong factor is -1"):
        overlong_penalty(SCORES, max_length=16, buffer_length=4, factor=-1)
