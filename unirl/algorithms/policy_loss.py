"""The clipped policy loss of PPO, with unequal bounds and the optional dual clip."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unirl.algorithms.kl import kl_k3
from unirl.algorithms.masking import masked_sum
from unirl.algorithms.metric_sums import token_metrics
from unirl.algorithms.tensor_checks import (
    as_float,
    require_denominator,
    require_mask,
    require_rank,
    require_same_shape,
)
from unirl.errors import ConfigError

__all__ = [
    "bounded_ratio",
    "clipped_surrogate",
    "log_ratio",
    "masked_advantages",
    "policy_loss",
    "ratio_sums",
    "require_clip_bounds",
    "weighted_sum",
]

_LOG_RATIO_LIMIT = 20.0


def policy_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: float | Tensor,
    dual_clip: float | None = None,
    weights_BT: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum the clipped surrogate over valid tokens and divide it by `denominator`.

        ratio = exp(clamp(logprob - old_logprob, -20, 20))
        l     = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))
        l     = min(l, -A dual_clip)   where A < 0, if dual_clip is given
        loss  = sum_valid w l / denominator

    GRPO, RLOO, REINFORCE++ and Dr.GRPO are calls of this with other advantages; DAPO is a call with
    clip_high > clip_low.

    Args:
        logprobs_BT: Float (B, T), nats, of the policy being trained; gradients flow to it alone.
        old_logprobs_BT: Float (B, T), nats, of the policy that sampled (never the reference).
        advantages_BT: Float (B, T), larger is better.
        mask_BT: Bool (B, T). Values under the mask are ignored, NaN and -inf too.
        clip_low: Distance below 1 from which a falling ratio is no longer rewarded, in [0, 1].
        clip_high: Distance above 1 from which a rising ratio is no longer rewarded, 0 or more.
        denominator: What the sum is divided by, above 0. Pass the number of valid tokens of *all*
            micro-batches and ranks of the update, and their losses add up to the token mean of the whole.
        dual_clip: Largest ratio that a negative advantage is charged for, above 1; 3 is usual.
        weights_BT: Float (B, T), multiplies each token's loss, no gradient; for a mean a sequence, a weight
            a modality, or an importance weight. None is 1.

    Returns:
        loss 0-d (0 with a gradient of 0 if nothing is valid), and metrics (see `metric_sums`):
        "policy/loss_sum" (before weights), "policy/clip_fraction_sum" (tokens where the clipped term is
        the larger), "policy/dual_clip_fraction_sum", "policy/ratio_sum", "policy/ratio_max",
        "policy/ratio_min" (before the clip), "policy/kl_old_sum" (k3 to the sampling policy),
        "policy/tokens".

    Raises:
        ShapeError: If shapes differ or the mask is not bool.
        ConfigError: If a bound or the denominator is out of range.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347, equation 7;
    unequal bounds: Yu et al. 2025, "DAPO", arXiv:2503.14476, equation 10; dual clip: Ye et al. 2020,
    "Mastering Complex Control in MOBA Games", arXiv:1912.09729;
    `compute_policy_loss_vanilla` of verl 0.9.1.
    """
    _require_dual_clip(dual_clip)
    return clipped_surrogate(
        log_ratio(logprobs_BT, old_logprobs_BT, mask_BT),
        advantages_BT,
        mask_BT,
        clip_low=clip_low,
        clip_high=clip_high,
        denominator=denominator,
        dual_clip=dual_clip,
        weights_BT=weights_BT,
    )


def clipped_surrogate(
    log_ratio_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: float | Tensor,
    dual_clip: float | None,
    weights_BT: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute `policy_loss` from log-ratios, of tokens (PPO) or of sequences (GSPO), 0 under the mask."""
    require_clip_bounds(clip_low, clip_high)
    require_denominator(denominator)
    advantages = masked_advantages(advantages_BT, mask_BT)
    ratio = bounded_ratio(log_ratio_BT)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    token_loss = torch.maximum(plain, clipped)
    charged_less = torch.zeros_like(mask_BT)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        charged_less = (advantages < 0) & (token_loss > ceiling)
        token_loss = torch.where(charged_less, ceiling, token_loss)
    metrics = token_metrics(
        "policy",
        mask_BT,
        sums={
            "loss": token_loss,
            "clip_fraction": clipped > plain,
            "dual_clip_fraction": charged_less,
            **ratio_sums(log_ratio_BT),
        },
        extremes={"ratio": ratio},
    )
    return weighted_sum(token_loss, mask_BT, weights_BT) / denominator, metrics


def bounded_ratio(log_ratio_BT: Tensor) -> Tensor:
    """Return exp of the log-ratio, clamped to +-20 before, so that it stays finite."""
    return log_ratio_BT.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()


def ratio_sums(log_ratio_BT: Tensor) -> dict[str, Tensor]:
    """Return what every policy loss reports of the ratio, per token: itself and k3 to the sampling policy."""
    return {
        "ratio": bounded_ratio(log_ratio_BT),
        "kl_old": kl_k3(log_ratio_BT, torch.zeros_like(log_ratio_BT)),
    }


def log_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return logprob - old_logprob (B, T), 0 where the mask is False; only `logprobs_BT` gets a gradient."""
    require_rank(2, logprobs_BT=logprobs_BT)
    require_same_shape(logprobs_BT=logprobs_BT, old_logprobs_BT=old_logprobs_BT, mask_BT=mask_BT)
    require_mask(mask_BT=mask_BT)
    # Masked before exp: exp of a stray value would give inf * 0 = NaN in the gradient.
    return torch.where(mask_BT, as_float(logprobs_BT) - as_float(old_logprobs_BT).detach(), 0.0)


def masked_advantages(advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the advantages (B, T) without gradient, 0 where the mask is False."""
    require_same_shape(advantages_BT=advantages_BT, mask_BT=mask_BT)
    return torch.where(mask_BT, as_float(advantages_BT).detach(), 0.0)


def weighted_sum(token_loss_BT: Tensor, mask_BT: Tensor, weights_BT: Tensor | None) -> Tensor:
    """Sum the losses of valid tokens, each times its weight."""
    if weights_BT is None:
        return masked_sum(token_loss_BT, mask_BT)
    require_same_shape(mask_BT=mask_BT, weights_BT=weights_BT)
    return masked_sum(token_loss_BT * torch.where(mask_BT, weights_BT.detach(), 0.0), mask_BT)


def require_clip_bounds(clip_low: float, clip_high: float) -> None:
    """Refuse bounds that are not distances from 1."""
    if not 0.0 <= clip_low <= 1.0:
        raise ConfigError(f"clip_low is {clip_low}; it is a distance below 1 and needs a number from 0 to 1")
    if not (math.isfinite(clip_high) and clip_high >= 0.0):
        raise ConfigError(
            f"clip_high is {clip_high}; it is a distance above 1 and needs a finite number from 0"
        )


def _require_dual_clip(dual_clip: float | None) -> None:
    if dual_clip is not None and not (math.isfinite(dual_clip) and dual_clip > 1.0):
        raise ConfigError(
            f"dual_clip is {dual_clip}; it bounds a ratio and needs a finite number above 1, or None"
        )
