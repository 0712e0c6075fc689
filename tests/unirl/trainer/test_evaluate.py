from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from unirl.errors import ConfigError
from unirl.rollout.native import NativeEngine
from unirl.trainer.evaluate import Evaluation, evaluate_policy
from unirl.types import Direction, Prompt, Sample, SamplingSettings, Scores


def evaluate(toy: SimpleNamespace, prompts: Sequence[Prompt], **replaced: Any) -> Evaluation:
    policy = replaced.get("policy", toy.make_policy(seed=2))
    arguments = {
        "policy": policy,
        "engine": NativeEngine(policy),
        "sampling": SamplingSettings(),
        "tokenizer": toy.make_tokenizer(),
        "reward": toy.Likes(),
        "judge": toy.Even(),
        "seed": 3,
        "max_words": 3,
    }
    return evaluate_policy(Accelerator(cpu=True), prompts=prompts, **{**arguments, **replaced})


@pytest.mark.parametrize("direction", ["text", "image"])
def test_the_same_policy_gets_the_same_marks(toy: SimpleNamespace, direction: Direction) -> None:
    prompts = toy.make_prompts(direction, 6)
    torch.manual_seed(1)
    first = evaluate(toy, prompts)
    torch.manual_seed(2)
    second = evaluate(toy, prompts, micro_prompts=2)
    assert (first.scores.total == second.scores.total).all()
    assert (first.judgements == second.judgements).all()
    for sample, other in zip(first.samples, second.samples, strict=True):
        assert sample.caption == other.caption and (sample.image == other.image).all()


def test_a_prompt_keeps_its_random_numbers_whatever_comes_after_it(toy: SimpleNamespace) -> None:
    prompts = toy.make_prompts("text", 6)
    few, many = evaluate(toy, prompts[:3]), evaluate(toy, prompts)
    assert [sample.caption for sample in few.samples] == [sample.caption for sample in many.samples[:3]]


def test_another_seed_draws_other_samples(toy: SimpleNamespace) -> None:
    prompts = toy.make_prompts("text", 6)
    captions = [[sample.caption for sample in evaluate(toy, prompts, seed=seed).samples] for seed in (3, 4)]
    assert captions[0] != captions[1]


def test_samples_scores_and_judgements_keep_the_order_of_the_prompts(toy: SimpleNamespace) -> None:
    class Number:
        """The number in the prompt's key is reward and judgement."""

        def score(self, samples: Sequence[Sample]) -> Scores:
            numbers = np.array([float(sample.key[1:]) for sample in samples])
            return Scores(total=numbers, components={"half": numbers / 2})

        def judge(self, samples: Sequence[Sample]) -> np.ndarray:
            return self.score(samples).total

    found = evaluate(toy, toy.make_prompts("text", 5), reward=Number(), judge=Number(), micro_prompts=2)
    assert [sample.key for sample in found.samples] == ["p0", "p1", "p2", "p3", "p4"]
    assert found.scores.total.tolist() == found.judgements.tolist() == [0, 1, 2, 3, 4]
    assert found.scores.components["half"].tolist() == [0, 0.5, 1, 1.5, 2]
    assert found.reward == found.accuracy == 2.0


def test_means_leave_out_what_could_not_be_told() -> None:
    nan = float("nan")
    found = Evaluation(
        samples=[], scores=Scores(total=np.array([0.5, nan, 1.0])), judgements=np.array([nan, nan, nan])
    )
    assert found.reward == 0.75
    assert np.isnan(found.accuracy)


def test_every_rank_needs_a_prompt(toy: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match="0 evaluation prompts for 1 ranks"):
        evaluate(toy, [])
