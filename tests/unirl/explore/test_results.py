from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from unirl.explore.results import headlines, stage_results, stage_times
from unirl.explore.run import Run, open_run


@pytest.fixture
def run(run_dir: Path) -> Run:
    return open_run(run_dir)


def test_the_summary_goes_first(run: Run) -> None:
    text, image = stage_results(run)
    assert (text.stage, text.judge_before, text.judge_after, text.steps) == ("text", 0.25, 0.5, 4)
    assert (image.judge_after, image.seed) == (0.75, "0")


def test_without_a_summary_the_evaluations_around_each_stage_count(run: Run) -> None:
    results = stage_results(dataclasses.replace(run, summary={}))
    judged = {(line["stage"], line["direction"]): line["eval/judge"] for line in run.evals}
    assert [(r.judge_before, r.judge_after) for r in results] == [
        (judged["start", "text"], judged["text", "text"]),
        (judged["text", "image"], judged["image", "image"]),
    ]
    assert [r.steps for r in results] == [4, 4]


def test_a_stage_without_an_evaluation_yet_has_no_after(run: Run) -> None:
    early = [line for line in run.evals if line["stage"] == "start"]
    first = stage_results(dataclasses.replace(run, summary={}, evals=early))[0]
    assert math.isfinite(first.judge_before) and math.isnan(first.judge_after)
    assert not first.is_suspect


def test_a_reward_that_rises_while_the_judge_falls_is_suspect(run: Run) -> None:
    row = {
        "stage": "text",
        "judge_before": 0.5,
        "judge_after": 0.4,
        "reward_before": 0.1,
        "reward_after": 0.9,
    }
    assert stage_results(dataclasses.replace(run, summary={"runs": [row]}))[0].is_suspect


def test_seeds_of_a_stage_stand_together(run: Run) -> None:
    rows = [
        {"stage": stage, "seed": seed, "judge_before": 0.5, "judge_after": 0.5 + gain, "steps": 3}
        for stage, gains in (("text", (0.1, 0.3)), ("image", (0.2,)))
        for seed, gain in enumerate(gains)
    ]
    text, image = headlines(dataclasses.replace(run, summary={"runs": rows}))
    assert (text.stage, len(text.seeds), image.stage, len(image.seeds)) == ("text", 2, "image", 1)
    assert text.mean("judge_after") == pytest.approx(0.7)
    assert text.spread("judge_gain") == pytest.approx((0.1, 0.3))
    assert math.isnan(text.mean("reward_after")) and math.isnan(text.spread("reward_after")[1])


def test_times_follow_the_clock_and_add_the_phases_up(run: Run) -> None:
    text, image = stage_times(run)
    assert (text.wall_s, image.wall_s) == (8.0, 8.0)
    assert text.share == pytest.approx(0.5)
    assert dict(text.phases_s) == pytest.approx({"rollout": 4.0, "reward": 1.6, "update": 2.4})


def test_no_steps_give_no_results(run: Run) -> None:
    empty = dataclasses.replace(run, train=[], summary={})
    assert stage_results(empty) == []
    assert stage_times(empty) == []
