from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from storage import FeatureStore, View
from unirl.errors import ConfigError
from unirl.trainer.curriculum import Curriculum, outside_window
from unirl.trainer.prompts import PromptSource
from unirl.trainer.stages import Lesson, Stage
from unirl.types import Reward, Sample, Scores

STAGE = Stage(
    name="s",
    direction="text",
    prompts="split = 'rl'",
    steps=9,
    prompts_per_step=4,
    curriculum=(Lesson(from_step=2, prompts="caption LIKE 'dark%'"), Lesson(from_step=4, prompts="true")),
    success_window=(0.25, 0.75),
    success_every=3,
)


def curriculum_of(
    store: FeatureStore, stage: Stage = STAGE, rank: int = 0, world_size: int = 1
) -> Curriculum:
    def source(view: View, seed: int) -> PromptSource:
        return PromptSource(
            view,
            "text",
            image_size=8,
            prompts_per_step=stage.prompts_per_step,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )

    return Curriculum(stage, store.select(stage.prompts), source, seed=3)


def keys(curriculum: Curriculum, *steps: int) -> list[str]:
    return [prompt.key for step in steps for prompt in curriculum.next(step)]


def test_outside_the_window_by_hand() -> None:
    rates = {"c": 0.5, "b": 0.1, "a": 0.76, "d": 0.25, "e": 0.75}
    assert outside_window(rates, STAGE) == ["a", "b"]
    assert outside_window(rates, replace(STAGE, success_window=None)) == []


def test_conditions_change_on_schedule(toy_store: FeatureStore) -> None:
    curriculum = curriculum_of(toy_store)
    captions = {step: [p.caption for p in curriculum.next(step)] for step in range(6)}
    assert all(caption.startswith("dark") for step in (2, 3) for caption in captions[step])
    for steps in ((0, 1), (4, 5)):
        assert not all(caption.startswith("dark") for step in steps for caption in captions[step])


def test_what_is_left_out_rests_until_it_is_not(toy_store: FeatureStore) -> None:
    curriculum = curriculum_of(toy_store, replace(STAGE, curriculum=()))
    whole = set(keys(curriculum, *range(6)))
    assert len(whole) == 24
    left_out = sorted(whole)[:16]
    curriculum.leave_out(left_out)
    assert set(keys(curriculum, *range(6))) == whole - set(left_out)
    assert curriculum.kept_fraction == pytest.approx(8 / 24)
    before = keys(curriculum, 6, 7)
    curriculum.leave_out(left_out)
    assert set(before) | set(keys(curriculum, 8)) == whole - set(left_out)
    curriculum.leave_out([])
    assert set(keys(curriculum, *range(6))) == whole


def test_too_few_prompts_in_the_window_are_told_and_all_are_drawn(
    toy_store: FeatureStore, caplog: pytest.LogCaptureFixture
) -> None:
    curriculum = curriculum_of(toy_store, replace(STAGE, curriculum=()))
    whole = sorted(keys(curriculum, *range(6)))
    with caplog.at_level(logging.WARNING):
        curriculum.leave_out(whole[:-3])
    assert "3 prompts are inside success_window" in caplog.text
    assert curriculum.kept_fraction == 1.0
    assert len(set(keys(curriculum, *range(6)))) == 24


@pytest.mark.parametrize("stopped_at", [1, 3, 5])
def test_a_resumed_curriculum_draws_the_same_prompts(toy_store: FeatureStore, stopped_at: int) -> None:
    def go_on(curriculum: Curriculum, steps: range) -> list[str]:
        drawn = []
        for step in steps:
            if curriculum.is_choice_due(step):
                curriculum.leave_out(["toy/01", "toy/05"] if step == 3 else ["toy/02"])
            drawn += keys(curriculum, step)
        return drawn

    first = curriculum_of(toy_store)
    go_on(first, range(stopped_at))
    state = first.state_dict()
    expected = go_on(first, range(stopped_at, 9))
    second = curriculum_of(toy_store)
    second.load_state_dict(state)
    assert go_on(second, range(stopped_at, 9)) == expected


def test_ranks_share_the_prompts_of_one(toy_store: FeatureStore) -> None:
    alone, *ranks = (curriculum_of(toy_store, rank=r, world_size=n) for r, n in ((0, 1), (0, 2), (1, 2)))
    for curriculum in (alone, *ranks):
        curriculum.leave_out(["toy/01", "toy/05", "toy/09"])
    for step in range(5):
        assert sorted(keys(alone, step)) == sorted(key for rank in ranks for key in keys(rank, step))


def test_a_lesson_with_too_few_prompts_is_refused(toy_store: FeatureStore) -> None:
    lessons = (Lesson(from_step=1, prompts="key = 'toy/01'"), Lesson(from_step=2, prompts="false"))
    with pytest.raises(ConfigError) as caught:
        curriculum_of(toy_store, replace(STAGE, curriculum=lessons))
    assert "\"key = 'toy/01'\" selects 1 prompts, a step needs 4" in str(caught.value)
    assert "'false' selects 0 prompts" in str(caught.value)


class Solved:
    """Half of the prompts are solved: their samples score 1. All others score by turns."""

    def score(self, samples: list[Sample]) -> Scores:
        total = np.array(
            [1.0 if int(s.key[-2:]) % 2 else float(i % 2) for i, s in enumerate(samples)], dtype=np.float64
        )
        return Scores(total=total, components={"solved": total})


def test_a_run_with_everything_ends_early_and_goes_on_after_an_interruption(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    """Curriculum, success window, a stage's own reward, stopping rules: in one go and interrupted."""
    own: Reward = Solved()
    stages = (
        replace(
            toy.STAGES[0],
            steps=6,
            success_window=(0.1, 0.9),
            success_every=2,
            success_of="reward/solved",
            curriculum=(Lesson(from_step=3, prompts="true"),),
            kl_budget=1e9,
        ),
        replace(toy.STAGES[1], steps=8, plateau_evaluations=1, plateau_gain=2.0),
    )

    def make(run: Path, **options: Any) -> Any:
        return toy.make_trainer(
            run,
            toy_store,
            stages=stages,
            stage_rewards={"text": own},
            settings=replace(toy.SETTINGS, checkpoint_every=1, evaluate_every=1),
            **options,
        )

    class End(Exception):
        pass

    def end(stage: str, done: int, total: int, metrics: dict[str, float]) -> None:
        if (stage, done) == ("text", 5):
            raise End

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    make(whole).train()
    with pytest.raises(End):
        make(broken, on_step=end).train()
    make(broken).train()
    assert toy.metrics_of(broken) == toy.metrics_of(whole)
    assert toy.experience_of(broken) == toy.experience_of(whole)
    lines = toy.metrics_of(whole)
    ends = {line["stage"]: (line["reason"], line["stage_step"]) for line in lines if line["kind"] == "end"}
    assert ends == {"image": ("judge_plateau", 2)}
    kept = [line["curriculum/kept_fraction"] for line in lines if "curriculum/kept_fraction" in line]
    assert kept[0] == 1.0 and min(kept) < 1.0
    for row in toy.experience_of(whole).values():
        if row["kind"] == "train":
            assert ("reward/solved" in row and row["reward/solved"] is not None) == (row["stage"] == "text")
    solved = {
        row["prompt_key"]
        for row in toy.experience_of(whole).values()
        if row["kind"] == "train" and row["stage"] == "text" and row["step"] in (3, 4)
    }
    tried = {
        row["prompt_key"]
        for row in toy.experience_of(whole).values()
        if row["kind"] == "train" and row["stage"] == "text" and row["step"] in (1, 2)
    }
    assert not {key for key in solved & tried if int(key[-2:]) % 2}
