from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from unirl.errors import RewardError
from unirl.trainer.advantage_norm import NormalizedOver, normalize_advantages, normalized_over
from unirl.trainer.stages import Stage
from unirl.types import Direction

STAGE = Stage(name="s", direction="both", prompts="true", steps=1)
DIRECTIONS: list[Direction] = ["text", "image"]


def parts() -> tuple[list[Tensor], list[Tensor]]:
    """Two rollouts of four rows, words of unequal length and pictures, with very different spreads."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randn(4, 5, generator=generator) * 3 + 1
    pictures = torch.randn(4, 9, generator=generator) * 0.1 - 2
    lengths = torch.tensor([5, 2, 1, 4])
    return [words, pictures], [torch.arange(5) < lengths[:, None], torch.ones(4, 9, dtype=torch.bool)]


def normalized(over: NormalizedOver, values: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
    stage = replace(STAGE, advantage_norm=over)
    return normalize_advantages(Accelerator(cpu=True), values, masks, DIRECTIONS, stage, [2, 2])


def assert_white(values: np.ndarray) -> None:
    assert values.mean() == pytest.approx(0.0, abs=1e-5)
    assert values.std(ddof=1) == pytest.approx(1.0, abs=1e-4)


def test_over_what_mean_and_deviation_are_taken() -> None:
    values, masks = parts()
    white = normalized("batch", values, masks)
    assert_white(np.concatenate([w[m].numpy() for w, m in zip(white, masks, strict=True)]))
    for w, m in zip(normalized("modality", values, masks), masks, strict=True):
        assert_white(w[m].numpy())
    for w, m in zip(normalized("group", values, masks), masks, strict=True):
        for rows in (slice(0, 2), slice(2, 4)):
            assert_white(w[rows][m[rows]].numpy())
    assert normalized("none", values, masks)[0] is values[0]


def test_by_hand() -> None:
    """1, 2, 3 have mean 2 and deviation 1; what is masked stays out and is 0."""
    values, mask = torch.tensor([[1.0, 2.0], [3.0, 99.0]]), torch.tensor([[True, True], [True, False]])
    stage = replace(STAGE, direction="text", advantage_norm="batch")
    (white,) = normalize_advantages(Accelerator(cpu=True), [values], [mask], ["text"], stage, [2])
    torch.testing.assert_close(white, torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), atol=1e-6, rtol=0)


def test_the_algorithm_decides_unless_the_stage_does() -> None:
    assert normalized_over(replace(STAGE, algorithm="ppo")) == "batch"
    assert normalized_over(replace(STAGE, algorithm="grpo")) == "none"
    assert normalized_over(replace(STAGE, algorithm="grpo", advantage_norm="group")) == "group"


def test_nothing_scored_is_refused() -> None:
    values, masks = parts()
    with pytest.raises(RewardError, match="no sample of this step"):
        normalized("modality", values, [torch.zeros_like(mask) for mask in masks])
