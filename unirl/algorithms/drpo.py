"""DRPO: a smooth penalty on the shift of probability in place of the clip."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unirl.algorithms.metric_sums import token_metrics
from unirl.algorithms.policy_loss import bounded_ratio, log_ratio, masked_advantages, ratio_sums, weighted_sum
from unirl.algorithms.tensor_checks import as_float, require_denominator
from unirl.errors import ConfigError

__all__ = ["drpo_loss"]


def drpo_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    epsilon: float,
    denominator: float | Tensor,
    weights_BT: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Penalise the squared shift of the sampled token's probability, in proportion to the advantage.

        mu    = exp(old_logprob),   ratio = exp(clamp(logprob - old_logprob, -20, 20))
        l     = -A ratio + |A| mu (ratio - 1)^2 / (2 epsilon)
        loss  = sum_valid w l / denominator

    A token's log-prob is pushed with weight A ratio (1 - sign(A) (pi - mu) / epsilon), pi = mu ratio: the
    push fades to 0 when the probability has moved by epsilon in the wanted direction and turns back beyond.

    Args:
        logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, denominator, weights_BT: As for `policy_loss`.
        epsilon: Shift of probability at which the push is 0, above 0.

    Returns:
        loss 0-d, and metrics "policy/loss_sum", "policy/clip_fraction_sum" (tokens whose push is 0 or turned
        back), "policy/ratio_sum", "policy/ratio_max", "policy/ratio_min", "policy/kl_old_sum",
        "policy/tokens".

    Raises:
        ShapeError: If shapes differ or the mask is not bool.
        ConfigError: If epsilon or the denominator is not above 0.

    Source: Yao et al. 2026, "Rethinking the Divergence Regularization in LLM RL", arXiv:2606.09821. The form
    agrees with the paper's description (weight 0 at a shift of epsilon); its equations were not read.
    """
    if not (math.isfinite(epsilon) and epsilon > 0.0):
        raise ConfigError(f"epsilon is {epsilon}; it is a shift of probability and needs a number above 0")
    require_denominator(denominator)
    log_ratio_BT = log_ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    advantages = masked_advantages(advantages_BT, mask_BT)
    old_probs = torch.where(mask_BT, as_float(old_logprobs_BT).detach().exp(), 0.0)
    ratio = bounded_ratio(log_ratio_BT)
    penalty = advantages.abs() * old_probs * (ratio - 1.0).square() / (2.0 * epsilon)
    token_loss = penalty - advantages * ratio
    shift = advantages.sign() * old_probs * (ratio - 1.0)
    metrics = token_metrics(
        "policy",
        mask_BT,
        sums={"loss": token_loss, "clip_fraction": shift >= epsilon, **ratio_sums(log_ratio_BT)},
        extremes={"ratio": ratio},
    )
    return weighted_sum(token_loss, mask_BT, weights_BT) / denominator, metrics
