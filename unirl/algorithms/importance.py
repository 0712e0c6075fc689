"""Weights that correct for sampling from another policy than the one whose log-probs train."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from unirl.algorithms.policy_loss import bounded_ratio, log_ratio
from unirl.errors import ConfigError

__all__ = ["truncated_importance_weights"]


def truncated_importance_weights(
    logprobs_BT: Tensor,
    behaviour_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    limit: float,
    level: Literal["token", "sequence"] = "token",
) -> Tensor:
    """Weigh tokens by how much likelier the trained policy makes them than the engine that drew them.

        token:     w[b, t] = min(exp(d[b, t]), limit),   d = clamp(logprob - behaviour_logprob, -20, 20)
        sequence:  w[b, t] = min(exp(clamp(sum_valid (logprob - behaviour_logprob), -20, 20)), limit)

    Pass them as `weights_BT` of a loss: the ratio then compares with `logprobs_BT`, recomputed by the
    trainer at the start of the update, and the weight covers the way from the engine to there. The same
    weights let stored experience of an older policy be used again.

    Args:
        logprobs_BT: Float (B, T), nats, of the policy before the update, computed by the trainer.
        behaviour_logprobs_BT: Float (B, T), nats, as the engine or the older policy reported them.
        mask_BT: Bool (B, T).
        limit: Largest weight, 1 or more; 2 is usual.
        level: "token" has low variance and some bias, "sequence" the reverse.

    Returns:
        Float (B, T), no gradient; 0 where the mask is False.

    Raises:
        ShapeError: If shapes differ or the mask is not bool.
        ConfigError: If limit is below 1 or the level unknown.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    https://fengyao.notion.site/off-policy-rl; `compute_rollout_correction_weights` of verl 0.9.1.
    """
    if not (math.isfinite(limit) and limit >= 1.0):
        raise ConfigError(f"importance limit is {limit}; it bounds a ratio and needs a finite number from 1")
    if level not in ("token", "sequence"):
        raise ConfigError(f"importance level is {level!r}; choose token or sequence")
    difference = log_ratio(logprobs_BT.detach(), behaviour_logprobs_BT, mask_BT)
    if level == "sequence":
        difference = difference.sum(-1, keepdim=True).expand_as(difference)
    return torch.where(mask_BT, bounded_ratio(difference).clamp(max=limit), 0.0)
