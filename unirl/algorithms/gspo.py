"""GSPO: clip the ratio of whole responses instead of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.algorithms.policy_loss import clipped_surrogate, log_ratio

__all__ = ["gspo_loss"]


def gspo_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: float | Tensor,
    weights_BT: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the clipped surrogate with one ratio a response: the geometric mean of its tokens' ratios.

        s[b]     = exp(1/n_b sum_valid (logprob - old_logprob))
        l[b, t]  = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))
        loss     = sum_valid w l / denominator

    Each token carries the value of s[b] and the gradient of its own log-prob (the paper's GSPO-token), so
    that advantages may differ between tokens; for equal ones it is GSPO.

    Args:
        logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT: As for `policy_loss`. A response must not be
            split between micro-batches.
        clip_low, clip_high: Distances from 1. The mean over tokens shrinks ratios: the paper uses 3e-4 and
            4e-4.
        denominator: With `sequence_mean_weights`, the number of responses of the update.
        weights_BT: `sequence_mean_weights(mask_BT)` for the paper's loss; None for the token mean.

    Returns:
        loss 0-d and the metrics of `policy_loss`; "policy/ratio_*" and "policy/kl_old_sum" are of s.

    Raises:
        ShapeError, ConfigError: As `policy_loss`.

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071, sections 4.1 and 4.3;
    `compute_policy_loss_gspo` of verl 0.9.1.
    """
    token_log_ratio = log_ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    num_tokens = mask_BT.sum(-1, keepdim=True).clamp(min=1)
    sequence_log_ratio = token_log_ratio.detach().sum(-1, keepdim=True) / num_tokens
    own_gradient = token_log_ratio - token_log_ratio.detach()
    return clipped_surrogate(
        torch.where(mask_BT, sequence_log_ratio + own_gradient, 0.0),
        advantages_BT,
        mask_BT,
        clip_low=clip_low,
        clip_high=clip_high,
        denominator=denominator,
        dual_clip=None,
        weights_BT=weights_BT,
    )
