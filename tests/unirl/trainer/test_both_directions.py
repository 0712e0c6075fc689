"""A stage of both directions adds up what two stages would do, each modality by its own count."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from unirl.policies.token_lm import TokenLM
from unirl.rollout.native import NativeEngine
from unirl.trainer.collect import make_experience, roll_out
from unirl.trainer.stages import ModalitySettings, Stage
from unirl.trainer.update import update_policy
from unirl.types import MODALITIES, Experience, Scores

BOTH = Stage(
    name="s",
    direction="both",
    prompts="true",
    steps=1,
    algorithm="ppo",
    kl_in="loss",
    kl_coef=0.1,
    max_grad_norm=1e9,
    updates_per_step=1,
    max_words=3,
    text=ModalitySettings(loss_weight=2.0, entropy_coef=0.02),
    image=ModalitySettings(loss_weight=0.25, kl_coef=0.4),
)


@pytest.fixture(scope="module")
def policy(toy: SimpleNamespace) -> TokenLM:
    policy: TokenLM = toy.make_policy(seed=2).double()
    with torch.no_grad():
        policy.critic.value.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return policy


@pytest.fixture(scope="module")
def experiences(toy: SimpleNamespace, policy: TokenLM) -> list[Experience]:
    """One micro-batch of 8 texts and one of 8 pictures."""
    rollouts = [
        roll_out(
            NativeEngine(policy),
            toy.make_prompts(direction, 4),
            group_size=2,
            length=policy.max_response_length(direction, BOTH.max_words),
            sampling=BOTH.sampling,
            seeds=[(1, p) for p in range(4)],
            micro_prompts=4,
        )[0]
        for direction in MODALITIES
    ]
    scores = [Scores(total=np.linspace(0, 1, 8) ** power) for power in (2, 3)]
    reference = toy.make_policy(seed=3).double()
    return make_experience(Accelerator(cpu=True), policy, reference, rollouts, scores, BOTH)[0]


def gradients(
    policy: TokenLM, experiences: list[Experience], stage: Stage, *, tokens: int = 0
) -> dict[str, Tensor]:
    update_policy(
        Accelerator(cpu=True),
        policy,
        torch.optim.SGD(policy.parameters(), lr=0.0),
        experiences,
        stage,
        micro_batch_tokens=tokens,
    )
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def test_the_gradient_is_the_weighted_sum_over_modalities(
    policy: TokenLM, experiences: list[Experience]
) -> None:
    both = gradients(policy, experiences, BOTH)
    alone = {
        direction: gradients(policy, [experience], replace(BOTH, direction=direction))
        for direction, experience in zip(MODALITIES, experiences, strict=True)
    }
    assert any(gradient.abs().max() > 1e-3 for gradient in both.values())
    for name, gradient in both.items():
        torch.testing.assert_close(gradient, alone["text"][name] + alone["image"][name], atol=1e-9, rtol=0)
    unweighted = gradients(
        policy, experiences[1:], replace(BOTH, direction="image", image=ModalitySettings(kl_coef=0.4))
    )
    for name, gradient in alone["image"].items():
        torch.testing.assert_close(gradient, 0.25 * unweighted[name], atol=1e-9, rtol=0)


@pytest.mark.parametrize("tokens", [20, 64])
def test_packed_rows_of_both_directions_give_the_same_gradient(
    policy: TokenLM, experiences: list[Experience], tokens: int
) -> None:
    whole = gradients(policy, experiences, BOTH)
    packed = gradients(policy, experiences, BOTH, tokens=tokens)
    for name, gradient in whole.items():
        torch.testing.assert_close(packed[name], gradient, atol=1e-9, rtol=0)


def test_whitening_over_the_step_and_over_a_modality_differ(experiences: list[Experience]) -> None:
    """Here it was over the step: together the tokens have mean 0, the texts alone have not."""
    values = [e.advantages[e.loss_mask] for e in experiences]
    assert float(torch.cat(values).mean()) == pytest.approx(0.0, abs=1e-6)
    assert abs(float(values[0].mean())) > 1e-3
