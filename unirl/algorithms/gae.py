"""Generalised advantage estimation: credit for each token from rewards and a critic."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unirl.algorithms.tensor_checks import as_float, require_mask, require_rank, require_same_shape
from unirl.errors import ConfigError, ShapeError

__all__ = ["discounted_returns", "gae"]


def gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages and returns, going backwards over the valid tokens.

        delta[t] = r[t] + gamma V[t+1] - V[t]
        A[t]     = delta[t] + gamma lam A[t+1]
        R[t]     = A[t] + V[t]

    "t+1" is the next *valid* token: a masked step carries the value and the advantage through unchanged, so
    a gap in the middle neither discounts nor adds its reward (verl's rule; OpenRLHF 0.11.2 sets the value in
    a gap to 0 and discounts across it). After the last valid token A is 0 and V is `bootstrap_B`.

    Args:
        rewards_BT: Float (B, T), reward of each token.
        values_BT: Float (B, T), the critic's value before each token, in reward units.
        mask_BT: Bool (B, T), True on tokens that the policy chose.
        gamma: Discount a token, in [0, 1].
        lam: Trace decay a token, in [0, 1]; 1 gives Monte-Carlo returns, 0 one-step errors.
        bootstrap_B: Float (B,), V after the last valid token. Give 0 for a response that ended, and the
            critic's value of the cut state for one that hit the length limit. An image span of full length
            ended. None means that all ended.

    Returns:
        advantages (B, T), before whitening, and returns (B, T), float32 (float64 for float64 rewards), no
        gradient; 0 where the mask is False.

    Raises:
        ShapeError: If shapes differ or the mask is not bool.
        ConfigError: If gamma or lam is outside [0, 1].

    Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation", arXiv:1506.02438, equations 11, 12 and 16; `compute_gae_advantage_return` of verl 0.9.1.
    """
    require_rank(2, rewards_BT=rewards_BT)
    require_same_shape(rewards_BT=rewards_BT, values_BT=values_BT, mask_BT=mask_BT)
    require_mask(mask_BT=mask_BT)
    _require_share(gamma=gamma, lam=lam)
    rewards = torch.where(mask_BT, as_float(rewards_BT.detach()), 0.0)
    values = torch.where(mask_BT, as_float(values_BT.detach()), 0.0).to(rewards.dtype)
    next_value = _bootstrap(bootstrap_B, rewards)
    advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        valid = mask_BT[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(valid, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(valid, values[:, t], next_value)
        advantages[:, t] = advantage
    advantages = torch.where(mask_BT, advantages, 0.0)
    return advantages, advantages + values


def discounted_returns(rewards_BT: Tensor, mask_BT: Tensor, *, gamma: float) -> Tensor:
    """Add up the discounted rewards from each token on: credit without a critic (REINFORCE++).

        R[t] = r[t] + gamma R[t+1],   t+1 the next valid token

    It is `gae` with values of 0 and lam = 1. `whiten` over the whole batch of all ranks turns the returns
    into the advantages of REINFORCE++. Its baseline form whitens `dr_grpo_advantages`, spread to tokens.

    Args:
        rewards_BT: Float (B, T), reward of each token, the KL penalty in it if there is one.
        mask_BT: Bool (B, T).
        gamma: Discount a token, in [0, 1].

    Returns:
        Float32 (float64 for float64 rewards) (B, T), no gradient; 0 where the mask is False.

    Source: Hu 2025, "REINFORCE++", arXiv:2501.03262;
    `compute_reinforce_plus_plus_outcome_advantage` of verl 0.9.1.
    """
    return gae(rewards_BT, torch.zeros_like(rewards_BT), mask_BT, gamma=gamma, lam=1.0)[1]


def _bootstrap(bootstrap_B: Tensor | None, rewards: Tensor) -> Tensor:
    if bootstrap_B is None:
        return rewards.new_zeros(rewards.shape[0])
    if bootstrap_B.shape != rewards.shape[:1]:
        raise ShapeError(
            f"bootstrap_B has shape {tuple(bootstrap_B.shape)}, rewards_BT has {tuple(rewards.shape)}; "
            f"one value a row, shape {tuple(rewards.shape[:1])}, is needed"
        )
    return bootstrap_B.detach().to(rewards.dtype)


def _require_share(**shares: float) -> None:
    for name, share in shares.items():
        if not (math.isfinite(share) and 0.0 <= share <= 1.0):
            raise ConfigError(f"{name} is {share}; it needs a number from 0 to 1")
