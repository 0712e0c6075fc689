"""The optimizer of a run: one group for the actor, one for the critic, each with its learning rate."""

from __future__ import annotations

import torch

from unirl.algorithms import learning_rate_factor
from unirl.policies.policy import Policy
from unirl.trainer.algorithms import ALGORITHMS
from unirl.trainer.stages import Stage

__all__ = ["make_optimizer", "set_learning_rates"]


def make_optimizer(policy: Policy) -> torch.optim.AdamW:
    """AdamW with two groups, the actor's parameters and the critic's; learning rates 0."""
    groups = [{"params": policy.trained_parameters()}, {"params": policy.critic_parameters()}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)


def set_learning_rates(optimizer: torch.optim.Optimizer, stage: Stage, *, stage_step: int) -> None:
    """Set both groups to what the stage's schedule says of a step, counted from 0.

    The critic rests, at a rate of 0, where the stage's algorithm has none.
    """
    factor = learning_rate_factor(
        stage_step,
        warmup_steps=stage.warmup_steps,
        total_steps=max(stage.steps, stage.warmup_steps),
        decay=stage.learning_rate_decay,
        floor=stage.learning_rate_floor,
    )
    critic_rate = stage.critic_learning_rate if ALGORITHMS[stage.algorithm].uses_critic else 0.0
    for group, rate in zip(optimizer.param_groups, (stage.learning_rate, critic_rate), strict=True):
        group["lr"] = factor * rate
