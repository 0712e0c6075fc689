"""The algorithms that a stage can name: each is a choice of advantages, loss and average.

The trainer knows none of them. It asks the stage's `Algorithm` for token advantages, adds up its loss over
micro-batches, and divides by what it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unirl.algorithms import (
    discounted_returns,
    dr_grpo_advantages,
    drpo_loss,
    gae,
    group_advantages,
    gspo_loss,
    policy_loss,
    rloo_advantages,
    sequence_mean_weights,
    spread_to_tokens,
)
from unirl.trainer.stages import AlgorithmName, Stage

__all__ = ["ALGORITHMS", "Algorithm", "Credit", "RolledOut", "kl_place", "loss_count", "loss_weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledOut:
    """What credit is given from, for the samples of whole groups. B = P x G rows, prompt-major."""

    rewards: Tensor
    """float32 (B, T): the score at the last token, less the KL penalty where it is part of the reward."""
    values: Tensor
    """float32 (B, T), of the critic."""
    mask: Tensor
    """bool (B, T), True on tokens of rows that could be scored."""
    is_scored: Tensor
    """bool (B,)."""
    group_size: int
    """G."""

    def rewards_PG(self) -> Tensor:
        """float32 (P, G): each row's rewards added up, NaN where it could not be scored."""
        total = torch.where(self.mask, self.rewards, 0.0).sum(dim=1)
        return total.masked_fill(~self.is_scored, torch.nan).view(-1, self.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What a rollout's tokens earned."""

    advantages: Tensor
    """float32 (B, T), before they are whitened."""
    returns: Tensor
    """float32 (B, T), what the critic is fitted to."""


GiveCredit = Callable[[RolledOut, Stage], Credit]
TokenLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What tells one algorithm from another."""

    credit: GiveCredit
    loss: TokenLoss
    """(logprobs, old_logprobs, advantages, mask, stage, denominator=, weights_BT=) -> loss, metrics."""
    uses_critic: bool = False
    whitens: bool = False
    """Advantages are whitened over the tokens of the whole step, all ranks together."""
    kl_in: Literal["reward", "loss"] = "loss"
    """Where the divergence from the reference is charged, unless the stage says otherwise."""
    mean_over: Literal["tokens", "responses", "limit"] = "tokens"
    """The loss is a mean over valid tokens; over responses of the mean over their tokens; or a sum divided by
    rows times the length limit."""


def _from_critic(rolled_out: RolledOut, stage: Stage) -> Credit:
    advantages, returns = gae(
        rolled_out.rewards, rolled_out.values, rolled_out.mask, gamma=stage.gamma, lam=stage.lam
    )
    return Credit(advantages=advantages, returns=returns)


def _from_returns(rolled_out: RolledOut, stage: Stage) -> Credit:
    returns = discounted_returns(rolled_out.rewards, rolled_out.mask, gamma=stage.gamma)
    return Credit(advantages=returns, returns=returns)


def _from_groups(compare: Callable[[Tensor], Tensor]) -> GiveCredit:
    def credit(rolled_out: RolledOut, stage: Stage) -> Credit:
        advantages = compare(rolled_out.rewards_PG()).flatten()
        return Credit(
            advantages=spread_to_tokens(advantages, rolled_out.mask),
            returns=discounted_returns(rolled_out.rewards, rolled_out.mask, gamma=stage.gamma),
        )

    return credit


def _clipped(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, stage: Stage, **average: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    return policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_low=stage.clip_low,
        clip_high=stage.clip_high,
        dual_clip=stage.dual_clip,
        **average,
    )


def _clipped_by_sequence(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, stage: Stage, **average: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    return gspo_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_low=stage.clip_low,
        clip_high=stage.clip_high,
        **average,
    )


def _penalised(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, stage: Stage, **average: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    return drpo_loss(logprobs, old_logprobs, advantages, mask, epsilon=stage.drpo_epsilon, **average)


ALGORITHMS: Mapping[AlgorithmName, Algorithm] = {
    "ppo": Algorithm(credit=_from_critic, loss=_clipped, uses_critic=True, whitens=True, kl_in="reward"),
    "grpo": Algorithm(credit=_from_groups(group_advantages), loss=_clipped, mean_over="responses"),
    "dr_grpo": Algorithm(credit=_from_groups(dr_grpo_advantages), loss=_clipped, mean_over="limit"),
    "rloo": Algorithm(credit=_from_groups(rloo_advantages), loss=_clipped, kl_in="reward"),
    "reinforce_pp": Algorithm(credit=_from_returns, loss=_clipped, whitens=True, kl_in="reward"),
    "reinforce_pp_baseline": Algorithm(credit=_from_groups(dr_grpo_advantages), loss=_clipped, whitens=True),
    "dapo": Algorithm(credit=_from_groups(group_advantages), loss=_clipped),
    "gspo": Algorithm(
        credit=_from_groups(group_advantages), loss=_clipped_by_sequence, mean_over="responses"
    ),
    "drpo": Algorithm(credit=_from_groups(group_advantages), loss=_penalised),
}
"""By the name that a stage gives. `docs/algorithms.md` has a row for each."""


def kl_place(stage: Stage) -> Literal["reward", "loss"]:
    """Where the stage charges the divergence from the reference."""
    return stage.kl_in or ALGORITHMS[stage.algorithm].kl_in


def loss_weights(stage: Stage, mask_BT: Tensor) -> Tensor | None:
    """Return float32 (B, T), what each token's loss is multiplied by, or None for 1."""
    by_response = ALGORITHMS[stage.algorithm].mean_over == "responses"
    return sequence_mean_weights(mask_BT) if by_response else None


def loss_count(stage: Stage, mask_BT: Tensor) -> Tensor:
    """Return what a micro-batch adds to the denominator of the loss; add the entries up.

    Args:
        stage: Its algorithm says what the loss is a mean over.
        mask_BT: Bool (B, T).

    Returns:
        The mask itself, bool (B,) rows with a valid token, or int64 (B,) the length limit of each such row.
    """
    mean_over = ALGORITHMS[stage.algorithm].mean_over
    if mean_over == "tokens":
        return mask_BT
    rows = mask_BT.any(dim=1)
    if mean_over == "responses":
        return rows
    return rows * (mask_BT.shape[1] if stage.direction == "image" else stage.max_words + 1)
