"""The critic's regression to returns, with the optional clip around the values of the rollout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

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

__all__ = ["value_loss"]


def value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip: float | None,
    denominator: float | Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum the clipped squared error over valid tokens and divide it by `denominator`.

        loss = 1/2 sum_valid max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / denominator

    Args:
        values_BT: Float (B, T), of the critic being trained, reward units; gradients flow to it alone.
        old_values_BT: Float (B, T), of the critic before the update.
        returns_BT: Float (B, T), from `gae`.
        mask_BT: Bool (B, T). Values under the mask are ignored, NaN too.
        clip: c, above 0, reward units; None for the plain squared error.
        denominator: The one of `policy_loss`, so that actor and critic are normalised alike.

    Returns:
        loss 0-d (0 with a gradient of 0 if nothing is valid), and metrics: "value/loss_sum",
        "value/clip_fraction_sum" (tokens where the clipped error is the larger), "value/prediction_sum",
        "value/return_sum", "value/tokens".

    Raises:
        ShapeError: If shapes differ or the mask is not bool.
        ConfigError: If clip or the denominator is not above 0.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 9 (L^VF); the clip is that of OpenAI baselines'
    ppo2, in `compute_value_loss` of verl 0.9.1.
    """
    require_rank(2, values_BT=values_BT)
    require_same_shape(
        values_BT=values_BT, old_values_BT=old_values_BT, returns_BT=returns_BT, mask_BT=mask_BT
    )
    require_mask(mask_BT=mask_BT)
    require_denominator(denominator)
    values, old_values, returns = (
        torch.where(mask_BT, as_float(x), 0.0)
        for x in (values_BT, old_values_BT.detach(), returns_BT.detach())
    )
    error = (values - returns).square()
    clipped_error, is_far = error, torch.zeros_like(mask_BT)
    if clip is not None:
        if not (math.isfinite(clip) and clip > 0.0):
            raise ConfigError(f"value clip is {clip}; it needs a finite number above 0, or None for no clip")
        shift = values - old_values
        clipped_error, is_far = (old_values + shift.clamp(-clip, clip) - returns).square(), shift.abs() > clip
    token_loss = torch.maximum(error, clipped_error) / 2.0
    metrics = token_metrics(
        "value",
        mask_BT,
        sums={
            "loss": token_loss,
            "clip_fraction": is_far & (clipped_error > error),
            "prediction": values,
            "return": returns,
        },
    )
    return masked_sum(token_loss, mask_BT) / denominator, metrics
