from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from unirl.algorithms import mean_metrics
from unirl.policies.token_lm import TokenLM
from unirl.rollout.native import NativeEngine
from unirl.trainer.collect import make_experience, roll_out
from unirl.trainer.replay import replay_tokens
from unirl.trainer.sft import supervised_batch
from unirl.trainer.stages import AlgorithmName, Stage
from unirl.trainer.update import update_policy
from unirl.types import Direction, Experience, Prompt, Scores

NUM_PROMPTS, GROUP_SIZE = 4, 2
STAGE = Stage(
    name="s", direction="text", prompts="true", steps=1, updates_per_step=1, entropy_coef=0.01, kl_coef=0.1
)


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def policy_in(toy: SimpleNamespace, dtype: torch.dtype = torch.float32) -> TokenLM:
    policy = toy.make_policy(seed=2).to(dtype)
    with torch.no_grad():
        policy.critic.value.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return policy


def experiences_of(
    toy: SimpleNamespace,
    accelerator: Accelerator,
    policy: TokenLM,
    direction: Direction,
    *,
    micro_prompts: int = NUM_PROMPTS,
    totals: np.ndarray | None = None,
    stage: Stage = STAGE,
) -> list[Experience]:
    """Experience of 4 prompts x 2 samples, in micro-batches of some prompts each."""
    rollouts = roll_out(
        NativeEngine(policy),
        toy.make_prompts(direction, NUM_PROMPTS),
        group_size=GROUP_SIZE,
        length=policy.max_response_length(direction, 3),
        sampling=stage.sampling,
        seeds=[(1, p) for p in range(NUM_PROMPTS)],
        micro_prompts=micro_prompts,
    )
    totals = np.linspace(0, 1, NUM_PROMPTS * GROUP_SIZE) ** 2 if totals is None else totals
    parts = np.split(totals, len(rollouts))
    scores = [Scores(total=part) for part in parts]
    reference = toy.make_policy(seed=3).to(policy.lm.lm_head.weight.dtype)
    experiences, _ = make_experience(
        accelerator, policy, reference, rollouts, scores, stage, kl_coef=stage.kl_coef
    )
    return experiences


def one_step(
    accelerator: Accelerator,
    policy: TokenLM,
    experiences: list[Experience],
    replay: Sequence[Prompt] = (),
    **changes: Any,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradients of the last optimizer step, which does not move the weights, and the metrics."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    metrics = update_policy(
        accelerator,
        policy,
        optimizer,
        experiences,
        replace(STAGE, direction=experiences[0].rollout.direction, max_grad_norm=1e9, **changes),
        kl_coef=STAGE.kl_coef,
        replay=replay,
    )
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return gradients, mean_metrics(metrics)


@pytest.mark.parametrize("direction", get_args(Direction))
@pytest.mark.parametrize("micro_prompts", [1, 2])
def test_accumulated_is_one_batch(
    toy: SimpleNamespace, accelerator: Accelerator, direction: Direction, micro_prompts: int
) -> None:
    """In float64, where rollout, scoring and gradient leave no room for another formula."""
    policy = policy_in(toy, torch.float64)
    whole, whole_metrics = one_step(accelerator, policy, experiences_of(toy, accelerator, policy, direction))
    parts, part_metrics = one_step(
        accelerator, policy, experiences_of(toy, accelerator, policy, direction, micro_prompts=micro_prompts)
    )
    assert whole.keys() == parts.keys()
    assert any(gradient.abs().max() > 1e-3 for gradient in whole.values())
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=1e-9, rtol=0)
    assert part_metrics == pytest.approx(whole_metrics, abs=1e-6)


@pytest.mark.parametrize("algorithm", get_args(AlgorithmName))
def test_accumulated_is_one_batch_for_every_algorithm(
    toy: SimpleNamespace, accelerator: Accelerator, algorithm: AlgorithmName
) -> None:
    """Texts differ in length, so a mean of means would not be the mean."""
    policy = policy_in(toy, torch.float64)
    stage = replace(STAGE, algorithm=algorithm)
    whole, parts = (
        one_step(
            accelerator,
            policy,
            experiences_of(toy, accelerator, policy, "text", micro_prompts=size, stage=stage),
            algorithm=algorithm,
        )[0]
        for size in (4, 1)
    )
    assert any(gradient.abs().max() > 1e-3 for name, gradient in whole.items() if name.startswith("lm."))
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=1e-9, rtol=0)


@pytest.mark.parametrize("straight_through", [False, True])
def test_a_penalty_in_the_loss_is_the_estimators_gradient(
    toy: SimpleNamespace, accelerator: Accelerator, straight_through: bool
) -> None:
    policy = policy_in(toy, torch.float64)
    options: dict[str, Any] = {
        "algorithm": "grpo",
        "entropy_coef": 0.0,
        "kl_straight_through": straight_through,
    }
    (experience,) = experiences_of(toy, accelerator, policy, "text")
    no_credit = replace(experience, advantages=torch.zeros_like(experience.advantages))
    gradients, metrics = one_step(accelerator, policy, [no_credit], **options)

    policy.zero_grad()
    mask = experience.loss_mask
    rollout = experience.rollout
    rollout = replace(
        rollout, input_ids=rollout.input_ids.clone(), attention_mask=rollout.attention_mask.clone()
    )
    d = torch.where(
        mask, replay_tokens(policy, policy, rollout, STAGE.sampling).logprobs - experience.ref_logprobs, 0.0
    )
    k2, k3 = d.square() / 2, (-d).exp() - 1 + d
    (STAGE.kl_coef * (k2 if straight_through else k3)[mask].sum() / mask.sum()).backward()
    assert metrics["policy/kl_loss"] == pytest.approx(float(k3[mask].mean().detach()))
    for name, parameter in policy.lm.named_parameters():
        torch.testing.assert_close(gradients[f"lm.{name}"], parameter.grad, atol=1e-9, rtol=1e-6)


def test_an_algorithm_without_critic_leaves_it_alone(toy: SimpleNamespace, accelerator: Accelerator) -> None:
    policy = policy_in(toy)
    experiences = experiences_of(toy, accelerator, policy, "text")
    gradients, metrics = one_step(accelerator, policy, experiences, algorithm="rloo")
    assert not gradients["critic.value.weight"].any()
    assert not any(name.startswith("value/") for name in metrics)


def test_critic_and_policy_gradients_stay_apart(toy: SimpleNamespace, accelerator: Accelerator) -> None:
    """Without advantages and entropy the trunk gets no gradient, while the critic gets its own."""
    policy = policy_in(toy)
    (experience,) = experiences_of(toy, accelerator, policy, "image")
    no_credit = replace(experience, advantages=torch.zeros_like(experience.advantages))
    gradients, _ = one_step(accelerator, policy, [no_credit], entropy_coef=0.0)
    assert not any(gradient.any() for name, gradient in gradients.items() if name.startswith("lm."))
    assert gradients["critic.value.weight"].any()


def test_unscored_rows_leave_the_loss(toy: SimpleNamespace, accelerator: Accelerator) -> None:
    """A batch with two unscored rows gives the gradient of the batch without them, whatever they wrote."""
    policy = policy_in(toy)
    totals = np.array([0.1, np.nan, 0.9, 0.2, 0.5, 0.4, np.nan, 0.3])
    (experience,) = experiences_of(toy, accelerator, policy, "image", totals=totals)
    unscored = np.isnan(totals)
    assert not experience.loss_mask[unscored].any() and experience.loss_mask[~unscored].all()
    assert not experience.advantages[unscored].any()
    assert experience.advantages.isfinite().all() and experience.returns.isfinite().all()
    gradients, metrics = one_step(accelerator, policy, [experience])
    ids = experience.rollout.input_ids.clone()
    ids[unscored, -4:] = policy.vocabulary.grid.offset
    other = replace(experience, rollout=replace(experience.rollout, input_ids=ids))
    others, _ = one_step(accelerator, policy, [other])
    for name, gradient in gradients.items():
        assert gradient.isfinite().all()
        torch.testing.assert_close(others[name], gradient, atol=1e-7, rtol=0)
    assert metrics["policy/tokens"] == 6 * 4


def test_every_update_takes_other_prompts_and_an_epoch_takes_all(
    toy: SimpleNamespace, accelerator: Accelerator
) -> None:
    policy = policy_in(toy)
    experiences = experiences_of(toy, accelerator, policy, "image")
    tokens = NUM_PROMPTS * GROUP_SIZE * 4
    for updates, epochs in ((1, 1), (2, 1), (4, 1), (2, 3)):
        _, metrics = one_step(accelerator, policy, experiences, updates_per_step=updates, epochs=epochs)
        assert metrics["policy/tokens"] == tokens * epochs
    half, _ = one_step(accelerator, policy, experiences, updates_per_step=2)
    rows = torch.tensor([2, 3, 6, 7])
    rollout = experiences[0].rollout
    second = replace(
        experiences[0],
        rollout=replace(
            rollout,
            prompts=rollout.prompts[1::2],
            origin=rollout.origin.select(rows),
            **{
                name: getattr(rollout, name)[rows]
                for name in ("input_ids", "attention_mask", "response_mask", "old_logprobs", "truncated")
            },
        ),
        **{
            name: getattr(experiences[0], name)[rows]
            for name in ("old_logprobs", "ref_logprobs", "old_values", "loss_mask", "advantages", "returns")
        },
    )
    expected, _ = one_step(accelerator, policy, [second])
    for name, gradient in half.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-7, rtol=0)


def test_the_gradient_is_clipped_as_a_whole(toy: SimpleNamespace, accelerator: Accelerator) -> None:
    policy = policy_in(toy)
    experiences = experiences_of(toy, accelerator, policy, "image")
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    metrics = update_policy(
        accelerator,
        policy,
        optimizer,
        experiences,
        replace(STAGE, direction="image", max_grad_norm=1e-3),
        kl_coef=0.0,
    )
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(p.grad) for p in policy.parameters() if p.grad is not None])
    )
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)
    assert float(metrics["policy/grad_norm_max"]) > 1e-3


def test_the_first_pass_has_ratio_one(toy: SimpleNamespace, accelerator: Accelerator) -> None:
    """Policy, engine and update see one distribution: nothing is clipped before the weights move."""
    policy = policy_in(toy)
    for direction in get_args(Direction):
        _, metrics = one_step(accelerator, policy, experiences_of(toy, accelerator, policy, direction))
        assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["policy/ratio_min"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["policy/clip_fraction"] == 0.0


def test_a_step_makes_what_paid_more_likely(toy: SimpleNamespace, accelerator: Accelerator) -> None:
    policy = policy_in(toy)
    (experience,) = experiences_of(toy, accelerator, policy, "image")
    optimizer = torch.optim.SGD(policy.lm.parameters(), lr=0.05)
    stage = replace(STAGE, direction="image", entropy_coef=0.0)
    update_policy(accelerator, policy, optimizer, [experience], stage, kl_coef=0.0)
    rollout = experience.rollout
    with torch.no_grad():
        after = policy(
            rollout.input_ids, rollout.attention_mask, prompt_length=rollout.prompt_length, direction="image"
        ).logprobs
    gain = ((after - rollout.old_logprobs) * experience.advantages)[experience.loss_mask]
    assert float(gain.mean()) > 0


def test_replay_adds_the_supervised_gradient(toy: SimpleNamespace, accelerator: Accelerator) -> None:
    """PPO alone plus supervision alone, per token and weighted, is both together."""
    policy = policy_in(toy)
    experiences = experiences_of(toy, accelerator, policy, "image")
    prompts = toy.make_prompts("text", 4)
    alone, _ = one_step(accelerator, policy, experiences)
    both, metrics = one_step(accelerator, policy, experiences, prompts, replay_coef=0.5)
    ids, attention, prompt_length, mask = supervised_batch(policy, prompts)
    policy.zero_grad()
    output = policy(ids, attention, prompt_length=prompt_length, direction="text")
    loss = -output.logprobs[mask].mean()
    loss.backward()
    assert metrics["replay/loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert metrics["replay/tokens"] == int(mask.sum())
    for name, parameter in policy.lm.named_parameters():
        expected = alone[f"lm.{name}"] + 0.5 * parameter.grad
        torch.testing.assert_close(both[f"lm.{name}"], expected, atol=1e-6, rtol=0)
