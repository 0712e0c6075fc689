from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch

from unirl.errors import ConfigError
from unirl.policies.token_lm import TokenLM
from unirl.rollout.native import NativeEngine, sample_uniforms
from unirl.types import Direction, Rollout

DIRECTIONS = get_args(Direction)


@pytest.fixture(scope="module")
def policy(toy: SimpleNamespace) -> TokenLM:
    return toy.make_policy(seed=4)


def uniforms_for(num_prompts: int, group_size: int, length: int) -> np.ndarray:
    return np.stack([sample_uniforms((9, p), group_size, length) for p in range(num_prompts)])


def responses(rollout: Rollout) -> list[list[int]]:
    """Each row's real tokens."""
    lengths = rollout.response_mask.sum(1).tolist()
    return [ids[:n] for ids, n in zip(rollout.response_ids.tolist(), lengths, strict=True)]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_prompt_is_answered_alike_alone_and_in_any_company(
    policy: TokenLM, toy: SimpleNamespace, direction: Direction
) -> None:
    prompts, uniforms = toy.make_prompts(direction, 6), uniforms_for(6, 3, 4)
    engine = NativeEngine(policy)
    whole = engine.rollout(prompts, uniforms)
    for order in ([0], [3], [5, 1], [4, 3, 2, 1, 0]):
        part = engine.rollout([prompts[p] for p in order], uniforms[order])
        rows = torch.tensor([3 * p + g for p in order for g in range(3)])
        assert responses(part) == [responses(whole)[row] for row in rows]
        torch.testing.assert_close(part.old_logprobs, whole.old_logprobs[rows], atol=1e-5, rtol=0)
        assert part.truncated.equal(whole.truncated[rows])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_cache_changes_nothing(policy: TokenLM, toy: SimpleNamespace, direction: Direction) -> None:
    """Each log-prob equals the one of a forward pass without cache over that row alone, unpadded."""
    rollout = NativeEngine(policy).rollout(toy.make_prompts(direction), uniforms_for(4, 2, 4))
    for row, ids in enumerate(responses(rollout)):
        prompt = rollout.input_ids[row, : rollout.prompt_length]
        prompt = prompt[rollout.attention_mask[row, : rollout.prompt_length]]
        with torch.no_grad():
            logits = policy.lm(input_ids=torch.cat([prompt, torch.tensor(ids)])[None]).logits[0]
        logits = logits[len(prompt) - 1 : -1].masked_fill(~policy.allowed(direction), -torch.inf)
        expected = logits.log_softmax(-1)[torch.arange(len(ids)), ids]
        torch.testing.assert_close(rollout.old_logprobs[row, : len(ids)], expected, atol=1e-5, rtol=0)


def test_samples_follow_the_distribution(policy: TokenLM, toy: SimpleNamespace) -> None:
    """Evenly spaced random numbers give each first token as often as its probability says."""
    prompt, num = toy.make_prompts("image")[1], 4000
    uniforms = np.zeros((1, num, 4))
    uniforms[0, :, 0] = (np.arange(num) + 0.5) / num
    rollout = NativeEngine(policy).rollout([prompt], uniforms)
    first, logprobs = rollout.response_ids[:, 0], rollout.old_logprobs[:, 0]
    for code in first.unique():
        chosen = first == code
        assert float(chosen.double().mean()) == pytest.approx(float(logprobs[chosen][0].exp()), abs=1 / num)


def test_group_members_differ_and_keep_their_own_stream() -> None:
    four, two = sample_uniforms((3, 1, 5), 4, 6), sample_uniforms((3, 1, 5), 2, 6)
    assert four.shape == (4, 6) and four.dtype == np.float64
    assert (four[:2] == two).all()
    assert len(np.unique(four)) == 24
    assert (four >= 0).all() and (four < 1).all()


def test_streams_of_other_seeds_steps_and_prompts_differ() -> None:
    seeds = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0), (0, 1, 3)]
    assert len(np.unique([sample_uniforms(seed, 1, 4) for seed in seeds])) == 20


def test_a_longer_response_begins_alike() -> None:
    assert (sample_uniforms((1, 2), 2, 9)[:, :4] == sample_uniforms((1, 2), 2, 4)).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_sample_depends_on_its_own_random_numbers_alone(
    policy: TokenLM, toy: SimpleNamespace, direction: Direction
) -> None:
    prompts, uniforms = toy.make_prompts(direction), uniforms_for(4, 2, 4)
    changed = uniforms.copy()
    changed[2, 1] = 1.0 - changed[2, 1]
    before = responses(NativeEngine(policy).rollout(prompts, uniforms))
    after = responses(NativeEngine(policy).rollout(prompts, changed))
    assert [row for row in range(8) if before[row] != after[row]] == [5]


def _only(policy: TokenLM, ids: dict[int, int | list[int]]) -> torch.nn.Module:
    """A head that writes given tokens: `ids[t]` at decode step t, one for all rows or one for each."""

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = -1

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.step += 1
            logits = torch.zeros(len(hidden), policy.allowed("text").numel())
            wanted = torch.as_tensor(ids[self.step]).expand(len(hidden))
            logits[torch.arange(len(hidden)), wanted] = 50.0
            return logits

    return Head()


def _write(policy: TokenLM, toy: SimpleNamespace, ids: dict[int, int | list[int]], length: int) -> Rollout:
    head, policy.lm.lm_head = policy.lm.lm_head, _only(policy, ids)
    try:
        return NativeEngine(policy).rollout(toy.make_prompts("text", 3), uniforms_for(3, 1, length))
    finally:
        policy.lm.lm_head = head


def test_rows_end_at_their_own_end_token(policy: TokenLM, toy: SimpleNamespace) -> None:
    eos, word = policy.vocabulary.eos, policy.vocabulary.words("white")[0]
    rollout = _write(
        policy, toy, {0: [eos, word, word], 1: [word, eos, word], 2: word, 3: [word, word, eos]}, length=5
    )
    assert responses(rollout) == [[eos], [word, eos], [word, word, word, eos]]
    assert rollout.response_ids[:, 4].tolist() == [policy.vocabulary.pad] * 3
    assert rollout.truncated.tolist() == [False, False, False]
    assert rollout.active_rows == (3, 2, 1, 1)
    assert rollout.attention_mask[:, rollout.prompt_length :].equal(rollout.response_mask)
    assert not rollout.old_logprobs[~rollout.response_mask].any()


def test_an_end_at_the_last_place_is_an_end_and_a_word_there_is_a_cut(
    policy: TokenLM, toy: SimpleNamespace
) -> None:
    eos, word = policy.vocabulary.eos, policy.vocabulary.words("white")[0]
    rollout = _write(policy, toy, {0: word, 1: word, 2: [eos, word, word]}, length=3)
    assert responses(rollout) == [[word, word, eos], [word] * 3, [word] * 3]
    assert rollout.truncated.tolist() == [False, True, True]
    assert rollout.active_rows == (3, 3, 3)


def test_a_picture_is_never_cut(policy: TokenLM, toy: SimpleNamespace) -> None:
    rollout = NativeEngine(policy).rollout(toy.make_prompts("image"), uniforms_for(4, 2, 4), policy_version=7)
    assert not rollout.truncated.any() and rollout.response_mask.all()
    assert rollout.active_rows == (8, 8, 8, 8)
    assert rollout.policy_version == 7 and rollout.group_size == 2
    assert rollout.input_ids.shape == (8, rollout.prompt_length + 4)


def test_rows_are_prompt_major(policy: TokenLM, toy: SimpleNamespace) -> None:
    prompts = toy.make_prompts("image")
    rollout = NativeEngine(policy).rollout(prompts, uniforms_for(4, 2, 4))
    for row in range(8):
        real = rollout.attention_mask[row, : rollout.prompt_length]
        ids = rollout.input_ids[row, : rollout.prompt_length]
        assert ids[real].tolist() == policy.prompt_ids(prompts[row // 2])
        assert (ids[~real] == policy.vocabulary.pad).all()


def test_the_engine_samples_with_the_weights_of_the_moment(toy: SimpleNamespace) -> None:
    policy = toy.make_policy(seed=4)
    engine, prompts, uniforms = NativeEngine(policy), toy.make_prompts("image"), uniforms_for(4, 2, 4)
    before = engine.rollout(prompts, uniforms)
    with torch.no_grad():
        policy.lm.lm_head.weight.mul_(3.0)
    after = engine.rollout(prompts, uniforms)
    assert not after.old_logprobs.equal(before.old_logprobs)


def test_a_rollout_takes_no_global_random_numbers(policy: TokenLM, toy: SimpleNamespace) -> None:
    torch.manual_seed(1)
    first = NativeEngine(policy).rollout(toy.make_prompts("image"), uniforms_for(4, 2, 4))
    state = torch.get_rng_state()
    torch.manual_seed(2)
    second = NativeEngine(policy).rollout(toy.make_prompts("image"), uniforms_for(4, 2, 4))
    assert first.input_ids.equal(second.input_ids)
    torch.manual_seed(1)
    assert torch.get_rng_state().equal(state)


def test_prompts_of_two_directions_are_refused(policy: TokenLM, toy: SimpleNamespace) -> None:
    prompts = toy.make_prompts("image", 2)
    mixed = [prompts[0], dataclasses.replace(prompts[1], direction="text")]
    with pytest.raises(ConfigError, match=r"p1: direction 'text', the first prompt's is 'image'"):
        NativeEngine(policy).rollout(mixed, uniforms_for(2, 1, 4))


def test_a_picture_of_another_length_is_refused(policy: TokenLM, toy: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match=r"3 random numbers a sample, a picture has 4 codes"):
        NativeEngine(policy).rollout(toy.make_prompts("image", 2), uniforms_for(2, 1, 3))
