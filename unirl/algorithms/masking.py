"""Sums over valid tokens, and the moments that several ranks share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.algorithms.tensor_checks import as_float, require_mask, require_same_shape
from unirl.errors import ShapeError

__all__ = [
    "Moments",
    "masked_moments_sums",
    "masked_sum",
    "moments_from_sums",
    "sequence_mean_weights",
    "whiten",
]

_VARIANCE_FLOOR = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Count, mean and sample variance of all valid tokens, each float64 and 0-d."""

    count: Tensor
    mean: Tensor
    var: Tensor


def masked_sum(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum the valid entries; whatever stands under the mask, NaN too, adds nothing and gets no gradient.

    Args:
        x_BT: Float (B, T).
        mask_BT: Bool (B, T), True on entries that count.

    Returns:
        0-d, dtype of `x_BT`; 0 if nothing is valid.
    """
    require_same_shape(x_BT=x_BT, mask_BT=mask_BT)
    require_mask(mask_BT=mask_BT)
    return torch.where(mask_BT, x_BT, 0.0).sum()


def sequence_mean_weights(mask_BT: Tensor) -> Tensor:
    """Return token weights under which each response counts the same, whatever its length.

        w[b, t] = 1 / (number of valid tokens of b)

    As `weights_BT` of a loss whose denominator is the number of responses with a valid token, they give
    the mean over responses of the mean over tokens (GRPO's own and GSPO's).

    Args:
        mask_BT: Bool (B, T).

    Returns:
        Float32 (B, T); 0 where the mask is False.
    """
    require_mask(mask_BT=mask_BT)
    return mask_BT / mask_BT.sum(-1, keepdim=True).clamp(min=1)


def masked_moments_sums(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return what ranks must add up to know the moments of all valid tokens.

    Args:
        x_BT: Float (B, T).
        mask_BT: Bool (B, T).

    Returns:
        Float64 (3,): count, sum, sum of squares. All-reduce it with SUM, then call `moments_from_sums`.
    """
    require_same_shape(x_BT=x_BT, mask_BT=mask_BT)
    require_mask(mask_BT=mask_BT)
    valid = torch.where(mask_BT, x_BT.detach().double(), 0.0)
    return torch.stack([mask_BT.sum().double(), valid.sum(), valid.square().sum()])


def moments_from_sums(sums: Tensor) -> Moments:
    """Turn (count, sum, sum of squares) into count, mean and sample variance.

        mean = s1 / n,   var = (s2 - s1^2 / n) / (n - 1)

    Args:
        sums: Float64 (3,), from `masked_moments_sums`, added over ranks.

    Returns:
        Moments; the variance of fewer than two entries and the mean of none are 0.
    """
    if sums.shape != (3,):
        raise ShapeError(f"sums has shape {tuple(sums.shape)}; (3,) from masked_moments_sums is needed")
    count, total, squares = sums.double()
    mean = total / count.clamp(min=1.0)
    var = (squares - total * mean).clamp(min=0.0) / (count - 1.0).clamp(min=1.0)
    return Moments(count=count, mean=mean, var=torch.where(count < 2.0, 0.0, var))


def whiten(x_BT: Tensor, mask_BT: Tensor, *, moments: Moments | None = None) -> Tensor:
    """Shift and scale valid entries to mean 0 and deviation 1.

        y = (x - mean) / sqrt(var + 1e-8),   var the sample variance

    Args:
        x_BT: Float (B, T).
        mask_BT: Bool (B, T).
        moments: Of all ranks' valid tokens; None takes those of `x_BT`. Micro-batches of one batch must
            share them.

    Returns:
        Float32 (float64 for float64 x) (B, T), no gradient; 0 where the mask is False. A single valid entry
        and equal entries give 0.

    Source: `masked_whiten` of verl 0.9.1, which raises on a single valid entry instead.
    """
    if moments is None:
        moments = moments_from_sums(masked_moments_sums(x_BT, mask_BT))
    require_same_shape(x_BT=x_BT, mask_BT=mask_BT)
    require_mask(mask_BT=mask_BT)
    scaled = (x_BT.detach().double() - moments.mean) * torch.rsqrt(moments.var + _VARIANCE_FLOOR)
    return torch.where(mask_BT, scaled, 0.0).to(as_float(x_BT).dtype)
