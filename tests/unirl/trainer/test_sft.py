from __future__ import annotations

from dataclasses import replace
from itertools import cycle, repeat
from types import SimpleNamespace

import pytest
import torch

from unirl.trainer.sft import supervised_batch, train_supervised
from unirl.types import Direction


@pytest.mark.parametrize("direction", ["text", "image"])
def test_prompts_and_true_responses_side_by_side(toy: SimpleNamespace, direction: Direction) -> None:
    policy, prompts = toy.make_policy(), toy.make_prompts(direction, 3)
    ids, attention, prompt_length, mask = supervised_batch(policy, prompts)
    assert ids.shape == attention.shape and mask.shape == (3, ids.shape[1] - prompt_length)
    for row, prompt in enumerate(prompts):
        real = ids[row][attention[row]].tolist()
        assert real == policy.prompt_ids(prompt) + policy.response_ids(prompt)
        assert ids[row, prompt_length:][mask[row]].tolist() == policy.response_ids(prompt)
        assert attention[row, prompt_length:].equal(mask[row])


def test_the_last_rows_may_go_without_their_conditions(toy: SimpleNamespace) -> None:
    policy, prompts = toy.make_policy(), toy.make_prompts("image", 3)
    ids, attention, _, _ = supervised_batch(policy, prompts, unconditional=1)
    starts = [
        policy.prompt_ids(prompts[0]),
        policy.prompt_ids(prompts[1]),
        policy.unconditional_ids(prompts[2]),
    ]
    for row, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        assert ids[row][attention[row]].tolist() == start + policy.response_ids(prompt)


def test_drawing_without_a_caption_is_learnt_when_asked(toy: SimpleNamespace) -> None:
    """Otherwise what guidance contrasts with is a prompt that the policy never saw."""
    prompts = toy.make_prompts("image", 4)
    losses = []
    for fraction in (0.0, 0.5):
        policy = toy.make_policy()
        batches = cycle([prompts, prompts[::-1]])
        train_supervised(policy, batches, steps=30, learning_rate=1e-2, unconditional_fraction=fraction)
        ids, attention, length, mask = supervised_batch(policy, prompts, unconditional=4)
        with torch.no_grad():
            output = policy(ids, attention, prompt_length=length, direction="image")
        losses.append(-float(output.logprobs[mask].mean()))
    assert losses[1] < 0.8 * losses[0], losses


def test_the_loss_falls_in_both_directions(toy: SimpleNamespace) -> None:
    policy, prompts = toy.make_policy(), toy.make_prompts("image", 4)
    critic = policy.critic.hidden.weight.clone()
    losses: list[float] = []
    report = train_supervised(
        policy,
        repeat(prompts),
        steps=40,
        text_fraction=1.0,
        learning_rate=1e-2,
        on_step=lambda step, loss: losses.append(loss),
    )
    assert len(losses) == report.steps == 40
    assert losses[-1] < 0.5 * losses[0]
    assert 0 < report.text_loss < 1 and 0 < report.image_loss < 1.5
    assert report.text_loss + report.image_loss == pytest.approx(sum(losses[-4:]) / 4, rel=1e-4)
    assert policy.critic.hidden.weight.equal(critic)


def test_the_same_batches_give_the_same_policy(toy: SimpleNamespace) -> None:
    policies = [toy.make_policy() for _ in range(2)]
    for seed, policy in enumerate(policies):
        torch.manual_seed(seed)
        train_supervised(policy, repeat(toy.make_prompts("text", 4)), steps=3)
    for left, right in zip(*(policy.parameters() for policy in policies), strict=True):
        assert left.equal(right)


def test_learnt_words_are_written(toy: SimpleNamespace) -> None:
    """After enough steps on one pair the policy draws its picture and writes its caption."""
    policy = toy.make_policy()
    prompt = toy.make_prompts("image", 2)[1]
    train_supervised(policy, repeat([prompt]), steps=40, learning_rate=1e-2)
    for direction in ("text", "image"):
        turned = replace(prompt, direction=direction)
        ids, attention, length, mask = supervised_batch(policy, [turned])
        with torch.no_grad():
            output = policy(ids, attention, prompt_length=length, direction=direction)
        assert float(output.logprobs[mask].sum()) > -1.0
