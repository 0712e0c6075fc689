"""Advantages without a critic: each sample is compared with the other samples of its prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.algorithms.tensor_checks import as_float, require_rank
from unirl.errors import RewardError

__all__ = ["dr_grpo_advantages", "group_advantages", "informative_groups", "rloo_advantages"]

_EQUAL_SPREAD = 1e-6
"""Rewards whose relative spread is at most this are equal: float32 sums differ by as much."""


def group_advantages(rewards_PG: Tensor, *, normalize: bool = True, eps: float = 1e-6) -> Tensor:
    """Centre rewards inside each prompt's group and scale them by the group's spread (GRPO).

        a[p, g] = (r[p, g] - mean_g r) / (std_g r + eps),   std the sample deviation

    A normalised advantage is at most (n - 1) / sqrt(n) for n scored samples, so it needs no clipping.

    Args:
        rewards_PG: Float (P, G), any unit, larger is better. NaN marks a sample that could not be scored;
            it stays out of the mean and the deviation.
        normalize: Divide by the deviation. False gives the mean-only form.
        eps: Added to the deviation, in reward units.

    Returns:
        Float32 (float64 for float64 rewards) (P, G), no gradient. Unscored samples, a group with a single
        scored sample, and a group whose rewards are equal to 1e-6 of their size give 0.

    Raises:
        ShapeError: If rewards_PG is not 2-D.
        RewardError: If a reward is infinite.

    Source: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2;
    `compute_grpo_outcome_advantage` of verl 0.9.1, which keeps the raw reward of a group of one instead.
    """
    rewards, scored, count = _scored(rewards_PG)
    mean = rewards.sum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(scored, rewards - mean, 0.0)
    if normalize:
        variance = centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)
    informative = informative_groups(rewards_PG).unsqueeze(1)
    return torch.where(informative, centred, 0.0).to(as_float(rewards_PG).dtype)


def rloo_advantages(rewards_PG: Tensor) -> Tensor:
    """Compare each reward with the mean of the *other* scored samples of its group (leave one out).

        a[p, g] = r[p, g] - mean_{h != g} r[p, h] = n / (n - 1) (r[p, g] - mean_h r[p, h])

    Args:
        rewards_PG: Float (P, G); NaN marks a sample that could not be scored.

    Returns:
        Float32 (float64 for float64 rewards) (P, G), no gradient; zeros as in `group_advantages`.

    Source: Ahmadian et al. 2024, "Back to Basics", arXiv:2402.14740;
    `compute_rloo_outcome_advantage` of verl 0.9.1.
    """
    advantages = group_advantages(rewards_PG, normalize=False)
    count = (~rewards_PG.isnan()).sum(1, keepdim=True)
    return advantages * count / (count - 1).clamp(min=1)


def dr_grpo_advantages(rewards_PG: Tensor) -> Tensor:
    """Centre rewards inside each group and do not scale them: a = r - mean_g r.

    The other half of Dr.GRPO is the denominator of the policy loss: rows times the response length limit,
    whatever the responses' lengths are.

    Source: Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783, section 3.2.
    """
    return group_advantages(rewards_PG, normalize=False)


def informative_groups(rewards_PG: Tensor) -> Tensor:
    """Return which prompts teach something: two or more scored samples whose rewards differ.

    Dynamic sampling (DAPO) draws prompts until enough of them are informative.

    Args:
        rewards_PG: Float (P, G); NaN marks a sample that could not be scored.

    Returns:
        Bool (P,); False exactly where `group_advantages` gives a row of zeros.

    Source: Yu et al. 2025, "DAPO", arXiv:2503.14476, equation 11.
    """
    _, scored, count = _scored(rewards_PG)
    return ((count > 1) & ~_is_equal(rewards_PG, scored)).squeeze(1)


def _scored(rewards_PG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards float64 with 0 for unscored ones, where they are scored, and how many (P, 1)."""
    require_rank(2, rewards_PG=rewards_PG)
    infinite = rewards_PG.isinf()
    if bool(infinite.any()):
        place = infinite.nonzero()[0].tolist()
        raise RewardError(
            f"rewards_PG{place} is infinite; a reward needs a finite number, or NaN for 'could not be scored'"
        )
    scored = ~rewards_PG.isnan()
    rewards = torch.where(scored, rewards_PG.detach().double(), 0.0)
    return rewards, scored, scored.sum(1, keepdim=True)


def _is_equal(rewards_PG: Tensor, scored: Tensor) -> Tensor:
    """Bool (P, 1): the scored rewards of the group differ by rounding only."""
    if rewards_PG.shape[1] == 0:
        return scored.new_ones(scored.shape[0], 1)
    rewards = rewards_PG.detach().double()
    high = torch.where(scored, rewards, -torch.inf).amax(1, keepdim=True)
    low = torch.where(scored, rewards, torch.inf).amin(1, keepdim=True)
    return high - low <= _EQUAL_SPREAD * torch.maximum(high.abs(), low.abs())
