"""Distance to the reference policy: estimators of the KL divergence, as a loss, and the adaptive coefficient.

All take d = logprob - ref_logprob of tokens that were sampled from the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unirl.algorithms.masking import masked_sum
from unirl.algorithms.metric_sums import token_metrics
from unirl.algorithms.tensor_checks import as_float, require_denominator, require_mask, require_same_shape
from unirl.errors import ConfigError

__all__ = ["KL_ESTIMATORS", "AdaptiveKL", "kl_k1", "kl_k2", "kl_k3", "kl_loss", "straight_through"]

_K3_LIMIT = 20.0
_K3_CAP = 10.0


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return d, per token, nats. Unbiased and of either sign; as a loss its expected gradient is 0.

    Source: Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html, k1.
    """
    require_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return as_float(logprobs) - as_float(ref_logprobs)


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return d^2 / 2, per token, nats. Biased, never negative; on-policy its gradient as a loss is the KL's.

    Source: Schulman 2020, as `kl_k1`, k2.
    """
    return kl_k1(logprobs, ref_logprobs).square() / 2.0


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d, per token, nats. Unbiased, never negative; as a loss its gradient is biased.

    d is clamped to +-20 and the result to at most 10, so that one token far outside the reference cannot
    take over the update (verl and OpenRLHF do the same).

    Source: Schulman 2020, as `kl_k1`, k3; `kl_penalty_forward` of verl 0.9.1.
    """
    d = kl_k1(logprobs, ref_logprobs).clamp(-_K3_LIMIT, _K3_LIMIT)
    return (torch.expm1(-d) + d).clamp(max=_K3_CAP)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    """Return a tensor with the value of `value` and the gradient of `gradient_of`.

    y = value.detach() + (gradient_of - gradient_of.detach())
    """
    require_same_shape(value=value, gradient_of=gradient_of)
    return value.detach() + (gradient_of - gradient_of.detach())


def kl_loss(
    logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    estimator: str,
    denominator: float | Tensor,
    gradient_from_k2: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum an estimator over valid tokens and divide it by `denominator`; multiply by kl_coef outside.

        loss = sum_valid k(logprob, ref_logprob) / denominator

    Args:
        logprobs_BT: Float (B, T), nats, of the policy being trained.
        ref_logprobs_BT: Float (B, T), nats, of the frozen reference under the same distribution (temperature,
            allowed ids). No gradient flows to it.
        mask_BT: Bool (B, T).
        estimator: "k1", "k2" or "k3".
        denominator: Valid tokens of the whole update, as for `policy_loss`.
        gradient_from_k2: Keep the estimator's value and take the gradient of k2, which is that of the KL
            on-policy (the straight-through form).

    Returns:
        loss 0-d, and metrics "kl/reference_sum" (k1), "kl/reference_k3_sum", "kl/tokens".

    Raises:
        ConfigError: If the estimator is not one of the three or the denominator is not above 0.
        ShapeError: If shapes differ or the mask is not bool.

    Source: the estimators'; straight-through form: `kl_penalty` of verl 0.9.1 ("k3+").
    """
    if estimator not in KL_ESTIMATORS:
        raise ConfigError(f"kl estimator is {estimator!r}; choose one of {', '.join(KL_ESTIMATORS)}")
    require_same_shape(logprobs_BT=logprobs_BT, ref_logprobs_BT=ref_logprobs_BT, mask_BT=mask_BT)
    require_mask(mask_BT=mask_BT)
    require_denominator(denominator)
    logprobs = torch.where(mask_BT, as_float(logprobs_BT), 0.0)
    ref_logprobs = torch.where(mask_BT, as_float(ref_logprobs_BT).detach(), 0.0)
    value = KL_ESTIMATORS[estimator](logprobs, ref_logprobs)
    if gradient_from_k2:
        value = straight_through(value, kl_k2(logprobs, ref_logprobs))
    metrics = token_metrics(
        "kl",
        mask_BT,
        sums={"reference": kl_k1(logprobs, ref_logprobs), "reference_k3": kl_k3(logprobs, ref_logprobs)},
    )
    return masked_sum(value, mask_BT) / denominator, metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKL:
    """A KL coefficient that follows a target. `dataclasses.asdict` is its state.

        value *= 1 + clip(kl / target - 1, -0.2, 0.2) * min(num / horizon, 1)

    Example: `AdaptiveKL(value=0.2, target=6.0, horizon=10000).update(8.0, 256).value` is 0.201024.

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", arXiv:1909.08593,
    section 2.2; `AdaptiveKLController` of verl 0.9.1, whose coefficient turns negative when num is more
    than five times the horizon.
    """

    value: float
    """Coefficient now, 0 or more."""
    target: float
    """Wanted KL, above 0, in the unit that `update` is given (nats a token or nats a response)."""
    horizon: float
    """Above 0, in the unit of `num`: how much data it takes to move by the whole clipped error."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and self.value >= 0):
            raise ConfigError(f"kl coefficient is {self.value}; it needs a finite number from 0")
        if not (math.isfinite(self.target) and self.target > 0):
            raise ConfigError(f"kl target is {self.target}; it needs a finite number above 0")
        if not self.horizon > 0:
            raise ConfigError(f"kl horizon is {self.horizon}; it needs a number above 0")

    def update(self, kl: float, num: float) -> AdaptiveKL:
        """Return the controller after `num` samples (or tokens) whose mean KL was `kl`.

        Raises:
            ConfigError: If kl is not finite: the run is broken and no coefficient mends it.
        """
        if not math.isfinite(kl):
            raise ConfigError(f"measured kl is {kl}; look for NaN or -inf in log-probs before adapting to it")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, value=self.value * (1.0 + error * min(num / self.horizon, 1.0)))
