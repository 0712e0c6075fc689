"""Advantages shifted and scaled: over the whole step, over a modality, or inside each prompt's group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from accelerate import Accelerator
from torch import Tensor

from unirl.algorithms import whiten
from unirl.errors import RewardError
from unirl.trainer.algorithms import ALGORITHMS
from unirl.trainer.distributed import global_moments
from unirl.trainer.stages import Stage
from unirl.types import Direction

__all__ = ["NormalizedOver", "normalize_advantages", "normalized_over"]

NormalizedOver = Literal["batch", "modality", "group", "none"]


def normalized_over(stage: Stage) -> NormalizedOver:
    """What the stage normalises over: its own choice, or its algorithm's."""
    if stage.advantage_norm is not None:
        return stage.advantage_norm
    return "batch" if ALGORITHMS[stage.algorithm].whitens else "none"


def normalize_advantages(
    accelerator: Accelerator,
    advantages: Sequence[Tensor],
    masks: Sequence[Tensor],
    directions: Sequence[Direction],
    stage: Stage,
    group_sizes: Sequence[int],
) -> list[Tensor]:
    """Whiten token advantages as the stage says.

    "batch" takes mean and deviation of all valid tokens of the step, over all ranks; "modality" those of the
    tokens of one modality; "group" those of the samples of one prompt; "none" leaves advantages as they are.

    Args:
        accelerator: Its ranks share the moments.
        advantages: float32 (B, T) of each rollout of this rank.
        masks: bool (B, T), tokens that count.
        directions: Of each rollout.
        stage: Says over what.
        group_sizes: G of each rollout.

    Returns:
        float32 (B, T) each; 0 where the mask is False, unless nothing is normalised.

    Raises:
        RewardError: If no token of any rank counts.
    """
    over = normalized_over(stage)
    moments = global_moments(accelerator, _flat(advantages), _flat(masks))
    if not moments.count:
        raise RewardError("no sample of this step could be scored, so there is nothing to learn from")
    if over == "none":
        return list(advantages)
    if over == "group":
        return [_by_group(*part) for part in zip(advantages, masks, group_sizes, strict=True)]
    if over == "batch":
        return [whiten(*part, moments=moments) for part in zip(advantages, masks, strict=True)]
    of = {
        direction: global_moments(
            accelerator,
            _flat(advantages),
            _flat([m & (d == direction) for m, d in zip(masks, directions, strict=True)]),
        )
        for direction in stage.directions
    }
    return [
        whiten(values, mask, moments=of[direction])
        for values, mask, direction in zip(advantages, masks, directions, strict=True)
    ]


def _by_group(advantages: Tensor, mask: Tensor, group_size: int) -> Tensor:
    parts = zip(advantages.split(group_size), mask.split(group_size), strict=True)
    return torch.cat([whiten(values, valid) for values, valid in parts])


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])[None]
