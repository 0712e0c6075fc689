from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from unirl.trainer.optimizer import set_learning_rates
from unirl.trainer.stages import Stage

STAGE = Stage(
    name="text",
    direction="text",
    prompts="true",
    steps=6,
    warmup_steps=2,
    learning_rate=0.1,
    critic_learning_rate=0.4,
)


def rates(stage: Stage) -> tuple[list[float], list[float]]:
    """What the actor and the critic learn with at each step of the stage."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer, found = torch.optim.SGD(groups, lr=0.0), []
    for step in range(stage.steps):
        set_learning_rates(optimizer, stage, stage_step=step)
        found.append([group["lr"] for group in optimizer.param_groups])
    actor, critic = zip(*found, strict=True)
    return list(actor), list(critic)


def test_a_rate_rises_and_stays() -> None:
    actor, critic = rates(STAGE)
    assert actor == pytest.approx([0.05, 0.1, 0.1, 0.1, 0.1, 0.1])
    assert critic == pytest.approx([0.2, 0.4, 0.4, 0.4, 0.4, 0.4])


def test_a_rate_falls_to_its_floor_behind_the_last_step() -> None:
    """p = 0, 1/4, 1/2, 3/4 behind two steps to warm up; (1 + cos pi p) / 2 = 1, 0.85355, 0.5, 0.14645."""
    actor, critic = rates(replace(STAGE, learning_rate_decay="linear", learning_rate_floor=0.2))
    assert actor == pytest.approx([0.05, 0.1, 0.1, 0.08, 0.06, 0.04])
    assert critic == pytest.approx([4 * rate for rate in actor])
    actor, _ = rates(replace(STAGE, learning_rate_decay="cosine"))
    assert actor == pytest.approx([0.05, 0.1, 0.1, 0.085355, 0.05, 0.014645], abs=1e-6)


def test_the_critic_rests_where_there_is_none() -> None:
    assert set(rates(replace(STAGE, algorithm="grpo"))[1]) == {0.0}


def test_fewer_steps_than_it_takes_to_warm_up() -> None:
    actor, _ = rates(replace(STAGE, steps=2, warmup_steps=4, learning_rate_decay="linear"))
    assert actor == pytest.approx([0.025, 0.05])
