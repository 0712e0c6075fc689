from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from unirl.algorithms import gae, kl_penalty_rewards
from unirl.errors import ConfigError, RewardError
from unirl.policies.image_tokenizer import uint8_from_pixels
from unirl.policies.token_lm import TokenLM
from unirl.rollout.native import NativeEngine
from unirl.trainer.collect import make_experience, response_texts, roll_out, samples_of
from unirl.trainer.replay import replay_tokens
from unirl.trainer.stages import Stage
from unirl.types import Direction, Prompt, Rollout, SamplingSettings, Scores

STAGE = Stage(name="s", direction="image", prompts="true", steps=1, gamma=0.9, lam=0.8)


@pytest.fixture(scope="module")
def policy(toy: SimpleNamespace) -> TokenLM:
    return toy.make_policy(seed=2)


def rollouts_of(policy: TokenLM, prompts: list[Prompt], *, micro_prompts: int = 2) -> list[Rollout]:
    direction: Direction = prompts[0].direction
    return roll_out(
        NativeEngine(policy),
        prompts,
        group_size=2,
        length=policy.max_response_length(direction, 3),
        sampling=SamplingSettings(),
        seeds=[(1, p) for p in range(len(prompts))],
        micro_prompts=micro_prompts,
    )


def test_roll_out_in_parts_is_roll_out_at_once(policy: TokenLM, toy: SimpleNamespace) -> None:
    prompts = toy.make_prompts("text", 5)
    parts = rollouts_of(policy, prompts, micro_prompts=2)
    (whole,) = rollouts_of(policy, prompts, micro_prompts=5)
    assert [len(part.prompts) for part in parts] == [2, 2, 1]
    assert torch.cat([part.response_ids for part in parts]).equal(whole.response_ids)
    assert all((part.origin.policy_version == 0).all() for part in parts)


def test_drawings_become_pictures_with_the_prompts_words(policy: TokenLM, toy: SimpleNamespace) -> None:
    prompts, tokenizer = toy.make_prompts("image", 2), toy.make_tokenizer()
    (rollout,) = rollouts_of(policy, prompts)
    samples = samples_of(policy, tokenizer, rollout)
    drawn = uint8_from_pixels(tokenizer.decode(rollout.response_ids - policy.vocabulary.grid.offset))
    assert [sample.key for sample in samples] == ["p0", "p0", "p1", "p1"]
    for sample, picture, prompt in zip(samples, drawn, np.repeat(prompts, 2), strict=True):
        assert (sample.image == picture).all()
        assert sample.caption == sample.target == prompt.caption
    assert response_texts(policy, rollout) == [""] * 4


def test_descriptions_keep_the_prompts_picture(policy: TokenLM, toy: SimpleNamespace) -> None:
    prompts = toy.make_prompts("text", 2)
    (rollout,) = rollouts_of(policy, prompts)
    samples = samples_of(policy, toy.make_tokenizer(), rollout)
    texts = response_texts(policy, rollout)
    for row, sample in enumerate(samples):
        ids = rollout.response_ids[row][rollout.response_mask[row]].tolist()
        words = [policy.vocabulary.tokenizer.decode([i]) for i in ids if i != policy.vocabulary.eos]
        assert sample.caption == texts[row] == " ".join(words)
        assert sample.target == prompts[row // 2].caption
        assert (sample.image == prompts[row // 2].image).all()


def test_a_picture_that_the_reward_needs_is_missing(policy: TokenLM, toy: SimpleNamespace) -> None:
    prompt = toy.make_prompts("text", 1)[0]
    bare = Prompt(key="p9", direction="text", caption="dark", codes=prompt.codes)
    (rollout,) = rollouts_of(policy, [bare])
    with pytest.raises(ConfigError, match=r"p9: .* needs its picture for the reward"):
        samples_of(policy, toy.make_tokenizer(), rollout)


def experience(
    policy: TokenLM, toy: SimpleNamespace, totals: list[np.ndarray], direction: Direction = "image"
) -> list:
    rollouts = rollouts_of(policy, toy.make_prompts(direction, 2 * len(totals)))
    scores = [Scores(total=total) for total in totals]
    made, _ = make_experience(
        Accelerator(cpu=True), policy, toy.make_policy(seed=3), rollouts, scores, STAGE, kl_coef=0.3
    )
    return made


def test_advantages_are_whitened_over_the_whole_batch(policy: TokenLM, toy: SimpleNamespace) -> None:
    """Not over each micro-batch: the two have different means, and the batch mean 0 and deviation 1."""
    made = experience(policy, toy, [np.array([0.0, 0.1, 0.2, 0.1]), np.array([5.0, 6.0, 5.5, 7.0])])
    advantages = torch.cat([part.advantages[part.loss_mask] for part in made])
    assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(advantages.std()) == pytest.approx(1.0, abs=1e-4)
    assert float(made[0].advantages.mean()) < -0.5 < 0.5 < float(made[1].advantages.mean())


@pytest.mark.parametrize("direction", ["text", "image"])
def test_credit_is_the_formula_row_by_row(
    policy: TokenLM, toy: SimpleNamespace, direction: Direction
) -> None:
    total = np.array([0.3, 0.9, 0.1, 0.5])
    (made,) = experience(policy, toy, [total], direction)
    rollout, mask = made.rollout, made.loss_mask
    with torch.no_grad():
        reference = replay_tokens(toy.make_policy(seed=3), policy, rollout, STAGE.sampling).logprobs
        values = replay_tokens(policy, policy, rollout, STAGE.sampling).values
    torch.testing.assert_close(made.ref_logprobs[mask], reference[mask], atol=1e-6, rtol=0)
    rewards = kl_penalty_rewards(torch.from_numpy(total).float(), rollout.old_logprobs, reference, mask, 0.3)
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    torch.testing.assert_close(made.returns, returns, atol=1e-6, rtol=0)
    valid = advantages[mask]
    expected = (advantages - valid.mean()) / valid.std()
    torch.testing.assert_close(made.advantages[mask], expected[mask], atol=1e-4, rtol=0)
    assert not made.advantages[~mask].any()
    assert not made.advantages.requires_grad


def test_no_score_at_all_is_an_error_with_words(policy: TokenLM, toy: SimpleNamespace) -> None:
    with pytest.raises(RewardError, match="no sample of this step could be scored"):
        experience(policy, toy, [np.full(4, np.nan)])


def test_a_reward_that_scores_another_number_of_samples_is_named(
    policy: TokenLM, toy: SimpleNamespace
) -> None:
    with pytest.raises(RewardError, match=r"the reward gave 3 scores for 4 samples"):
        experience(policy, toy, [np.zeros(3)])
