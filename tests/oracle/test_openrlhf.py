"""The algorithms against OpenRLHF 0.11.2 itself, on random batches. `make oracle` installs and runs it."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from unirl.algorithms import kl_penalty_rewards, policy_loss, value_loss

openrlhf = pytest.importorskip("openrlhf", reason="OpenRLHF is not installed; run `make oracle`")


def module_of(name: str) -> ModuleType:
    """A module of `openrlhf.models` without its package and DeepSpeed, which need compiled GPU code."""
    sys.modules.setdefault("deepspeed", ModuleType("deepspeed"))
    package = ModuleType("openrlhf.models")
    package.__path__ = [f"{openrlhf.__path__[0]}/models"]
    sys.modules.setdefault("openrlhf.models", package)
    return importlib.import_module(f"openrlhf.models.{name}")


losses, models = module_of("loss"), module_of("utils")


@pytest.fixture(params=range(5))
def tensors(request: pytest.FixtureRequest) -> list[Tensor]:
    """Log-probs, old log-probs, advantages, values, old values and returns (6, 8), float64, and a mask."""
    generator = torch.Generator().manual_seed(request.param)
    draw = [torch.randn(6, 8, generator=generator, dtype=torch.float64) for _ in range(6)]
    old = -draw[1].abs()
    mask = torch.arange(8) < torch.randint(1, 9, (6, 1), generator=generator)
    return [old + 0.4 * draw[0], old, *draw[2:], mask]


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_policy_loss(tensors: list[Tensor], dual_clip: float | None) -> None:
    logprobs, old, advantages, *_, mask = tensors
    mine, _ = policy_loss(
        logprobs,
        old,
        advantages,
        mask,
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=dual_clip,
        denominator=float(mask.sum()),
    )
    peer = losses.PolicyLoss(0.2, 0.3, dual_clip=dual_clip)(logprobs, old, advantages, mask.double())[0]
    torch.testing.assert_close(mine, peer, atol=1e-6, rtol=0)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss(tensors: list[Tensor], clip: float | None) -> None:
    *_, values, old_values, returns, mask = tensors
    mine, _ = value_loss(values, old_values, returns, mask, clip=clip, denominator=float(mask.sum()))
    peer = losses.ValueLoss(clip)(values, old_values, returns, mask.double())
    torch.testing.assert_close(mine, peer, atol=1e-6, rtol=0)


def test_rewards_with_a_penalty(tensors: list[Tensor]) -> None:
    logprobs, old, *_, mask = tensors
    scores = torch.linspace(-1, 1, 6, dtype=torch.float64)
    peer = models.compute_reward(scores, 0.1, (logprobs - old) * mask, mask.double())
    mine = kl_penalty_rewards(scores, logprobs, old, mask, kl_coef=0.1)
    torch.testing.assert_close(mine * mask, peer * mask, atol=1e-6, rtol=0)
