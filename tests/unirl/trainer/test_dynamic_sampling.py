from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator

from storage import FeatureStore
from unirl.rollout.native import NativeEngine
from unirl.trainer.collect import roll_out, samples_of, split_scores
from unirl.trainer.dynamic_sampling import Drawn, draw_informative
from unirl.trainer.stages import Stage
from unirl.types import Prompt, Sample, SamplingSettings, Scores

STAGE = Stage(name="s", direction="text", prompts="true", steps=1, prompts_per_step=4, group_size=2)
DULL, SHARP = [0.5, 0.5], [0.0, 1.0]


class Rounds:
    """Rolls out four prompts a round in two micro-batches, with rewards that are given for each group."""

    def __init__(self, toy: SimpleNamespace, rewards: Sequence[Sequence[Sequence[float]]]) -> None:
        self.policy, self.tokenizer = toy.make_policy(seed=1), toy.make_tokenizer()
        self.prompts: list[Prompt] = toy.make_prompts("text", 4)
        self.rewards = rewards
        self.drawn: list[Drawn] = []

    def __call__(self, number: int) -> Drawn:
        assert number == len(self.drawn)
        rollouts = roll_out(
            NativeEngine(self.policy),
            [replace(prompt, key=f"r{number}p{p}") for p, prompt in enumerate(self.prompts)],
            group_size=2,
            length=4,
            sampling=SamplingSettings(),
            seeds=[(number, p) for p in range(4)],
            micro_prompts=2,
        )
        samples = [samples_of(self.policy, self.tokenizer, rollout) for rollout in rollouts]
        total = np.array(self.rewards[number], dtype=np.float64).flatten()
        self.drawn.append(
            Drawn(rollouts=rollouts, samples=samples, scores=split_scores(Scores(total=total), samples))
        )
        return self.drawn[-1]


def kept_keys(drawn: Drawn) -> list[str]:
    return [prompt.key for rollout in drawn.rollouts for prompt in rollout.prompts]


def draw(rounds: Rounds, at_most: int) -> tuple[Drawn, dict[str, float]]:
    return draw_informative(Accelerator(cpu=True), STAGE, rounds, rounds=at_most, micro_prompts=2)


def test_prompts_that_teach_nothing_are_drawn_for_again(toy: SimpleNamespace) -> None:
    """Two of the first four teach, then one, then three, of which one is left over."""
    rounds = Rounds(toy, [[SHARP, DULL, DULL, SHARP], [DULL, DULL, SHARP, DULL], [DULL, SHARP, SHARP, SHARP]])
    drawn, metrics = draw(rounds, 5)
    assert kept_keys(drawn) == ["r0p0", "r0p3", "r1p2", "r2p1"]
    assert [len(rollout.prompts) for rollout in drawn.rollouts] == [2, 2]
    assert metrics == {
        "sampling/rounds": 3.0,
        "sampling/informative_fraction": 0.5,
        "sampling/filled_fraction": 0.0,
    }
    for rollout, samples, scores in zip(drawn.rollouts, drawn.samples, drawn.scores, strict=True):
        assert scores.total.tolist() == SHARP * 2
        assert [sample.key for sample in samples] == [p.key for p in rollout.prompts for _ in range(2)]


def test_rows_are_the_rows_that_were_drawn(toy: SimpleNamespace) -> None:
    rounds = Rounds(toy, [[DULL, SHARP, SHARP, DULL], [SHARP, DULL, DULL, SHARP]])
    drawn, _ = draw(rounds, 2)
    rows = {}
    for part in rounds.drawn:
        for rollout in part.rollouts:
            for b in range(len(rollout.input_ids)):
                ids = rollout.input_ids[b][rollout.attention_mask[b]].tolist()
                rows[rollout.prompts[b // 2].key, b % 2] = (
                    ids,
                    rollout.old_logprobs[b][rollout.response_mask[b]].tolist(),
                )
    for rollout in drawn.rollouts:
        for b in range(len(rollout.input_ids)):
            ids = rollout.input_ids[b][rollout.attention_mask[b]].tolist()
            logprobs = rollout.old_logprobs[b][rollout.response_mask[b]].tolist()
            assert rows[rollout.prompts[b // 2].key, b % 2] == (ids, logprobs)


def test_rounds_are_bounded_and_the_rest_is_made_up(toy: SimpleNamespace) -> None:
    rounds = Rounds(toy, [[DULL, SHARP, DULL, DULL], [DULL, DULL, DULL, SHARP]])
    drawn, metrics = draw(rounds, 2)
    assert kept_keys(drawn) == ["r0p0", "r0p1", "r0p2", "r1p3"]
    assert metrics["sampling/filled_fraction"] == 0.5
    assert metrics["sampling/rounds"] == 2.0


def test_one_round_takes_what_comes(toy: SimpleNamespace) -> None:
    rounds = Rounds(toy, [[DULL] * 4])
    drawn, metrics = draw(rounds, 1)
    assert drawn is rounds.drawn[0]
    assert metrics == {}


class Seldom:
    """Tells samples apart for one prompt in two, by the number in its key."""

    def score(self, samples: Sequence[Sample]) -> Scores:
        total = np.array([float(int(s.key[-2:]) % 4 == 1 and i % 2) for i, s in enumerate(samples)])
        return Scores(total=total, components={"seldom": total})


@pytest.mark.parametrize("direction", ["text", "both"])
def test_a_run_that_draws_again_goes_on_after_an_interruption(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path, direction: str
) -> None:
    stage = replace(
        toy.STAGES[0],
        name="s",
        direction=direction,
        algorithm="dapo",
        sampling_rounds=4,
        steps=3,
    )

    def make(run: Path, **options: Any) -> Any:
        settings = replace(toy.SETTINGS, checkpoint_every=1)
        return toy.make_trainer(
            run, toy_store, stages=(stage,), reward=Seldom(), settings=settings, **options
        )

    class End(Exception):
        pass

    def end(stage: str, done: int, total: int, metrics: dict[str, float]) -> None:
        if done == 2:
            raise End

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    make(whole).train()
    with pytest.raises(End):
        make(broken, on_step=end).train()
    make(broken).train()
    assert toy.metrics_of(broken) == toy.metrics_of(whole)
    assert toy.experience_of(broken) == toy.experience_of(whole)
    for line in toy.metrics_of(whole):
        if line["kind"] == "train":
            assert line["sampling/rounds"] > 1
            assert line["sampling/filled_fraction"] < 0.5
    rows = [row for row in toy.experience_of(whole).values() if row["kind"] == "train"]
    assert len(rows) == 3 * 4 * 2
