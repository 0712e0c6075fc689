"""Row PPO-10 of the case list: a reward that is exploited is caught while it still climbs."""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unirl.policies.image_tokenizer import ImageTokenizer, uint8_from_pixels
from unirl.rewards import Ensemble, PictureStatistic
from unirl.trainer.sft import train_supervised
from unirl.types import Prompt, Reward, Sample, Scores

TOY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "toy.py")))
CODES = {
    caption: torch.tensor([left, right, left, right]) * 2 + 1
    for caption, (left, right) in zip(TOY.CAPTIONS, itertools.product(range(4), repeat=2))
}
"""What a caption asks for: the code of its left shade on the left, above and below, and so on the right."""


class GreySquares(ImageTokenizer):
    """Codes are greys from black to white, each a quarter of the picture."""

    def decode(self, codes: Tensor) -> Tensor:
        greys = 2 * codes.view(-1, 1, 2, 2) / (self.num_codes - 1) - 1
        return torch.nn.functional.interpolate(greys.expand(-1, 3, -1, -1), size=TOY.SIDE)


TOKENIZER = GreySquares(TOY.make_tokenizer().model)


class Likeness:
    """How many of the four squares are as the caption says; as a judge, whether all are."""

    def score(self, samples: Sequence[Sample]) -> Scores:
        asked = np.stack([uint8_from_pixels(TOKENIZER.decode(CODES[s.target][None]))[0] for s in samples])
        right = (np.stack([s.image for s in samples]) == asked).mean(axis=(1, 2, 3))
        return Scores(total=right, components={})

    def judge(self, samples: Sequence[Sample]) -> np.ndarray:
        return (self.score(samples).total == 1.0).astype(np.float64)


def trained_on(reward: Reward, run: Path) -> list[dict[str, Any]]:
    """Warm a policy up until it draws most captions right, train it on a reward, and return its lines."""
    prompts = [
        Prompt(key=caption, direction="image", caption=caption, codes=codes.numpy())
        for caption, codes in CODES.items()
    ]
    policy = TOY.make_policy()
    train_supervised(policy, itertools.repeat(prompts), steps=30, learning_rate=1e-2)
    stage = replace(
        TOY.STAGES[1], steps=10, learning_rate=1e-3, prompts_per_step=16, group_size=4, replay_prompts=0
    )
    trainer = TOY.make_trainer(
        run,
        TOY.make_store(run.parent / "store"),
        policy=policy,
        tokenizer=TOKENIZER,
        reward=reward,
        judge=Likeness(),
        stages=(stage,),
        settings=replace(TOY.SETTINGS, micro_prompts=8, checkpoint_every=100, evaluate_every=2),
        evaluation_prompts={"image": prompts * 6},
    )
    trainer.train()
    lines: list[dict[str, Any]] = TOY.metrics_of(run)
    return lines


@pytest.mark.slow
def test_ppo_10_mean_darkness_raises_an_alarm_before_it_saturates(tmp_path: Path) -> None:
    darkness = Ensemble({"brightness": (PictureStatistic("brightness"), -1.0)})
    lines = trained_on(darkness, tmp_path / "run")
    evaluations = {line["step"]: line for line in lines if line["kind"] == "eval"}
    rewards = {step: line["eval/reward"] for step, line in evaluations.items()}
    first, best = rewards[0], max(rewards.values())
    (alarm,) = [line for line in lines if line.get("alarm") == "reward_and_judge"]
    assert evaluations[0]["eval/judge"] > 0.5
    assert rewards[alarm["step"]] - first < 0.9 * (best - first)
    assert alarm["alarm/judge_after"] < alarm["alarm/judge_before"]
    assert alarm["alarm/reward_after"] > alarm["alarm/reward_before"]


@pytest.mark.slow
def test_ppo_10_a_reward_that_means_what_the_judge_sees_raises_none(tmp_path: Path) -> None:
    lines = trained_on(Likeness(), tmp_path / "run")
    assert not [line["message"] for line in lines if line["kind"] == "alarm"]
    assert len([line for line in lines if line["kind"] == "eval"]) == 6
