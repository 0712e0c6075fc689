from __future__ import annotations

from typing import Any

import pytest

from unirl.trainer.alarms import AlarmSettings, AlarmWatch


def evaluation(step: int, *, reward: float, judge: float, num: int = 100) -> dict[str, Any]:
    return {
        "kind": "eval",
        "stage": "image",
        "direction": "image",
        "step": step,
        "eval/reward": reward,
        "eval/reward_std": 0.3,
        "eval/judge": judge,
        "eval/num": num,
    }


def train(step: int, **values: float) -> dict[str, Any]:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return {"kind": "train", "stage": "image", "direction": "image", "step": step, **named}


def names(lines: list[dict[str, Any]], **settings: Any) -> list[tuple[str, int]]:
    watch = AlarmWatch(AlarmSettings(**settings))
    return [(alarm.name, alarm.step) for line in lines for alarm in watch.see(line)]


def test_a_reward_that_climbs_while_the_judge_falls_is_an_alarm_with_its_numbers() -> None:
    watch = AlarmWatch(AlarmSettings())
    assert not watch.see(evaluation(0, reward=0.5, judge=0.5))
    assert not watch.see(evaluation(2, reward=0.6, judge=0.48))
    (alarm,) = watch.see(evaluation(4, reward=0.7, judge=0.25))
    assert alarm.name == "reward_and_judge" and alarm.step == 4
    assert "from 0.5 to 0.7" in alarm.message and "50.0% to 25.0%" in alarm.message
    # 0.2 over sqrt(2) * 0.3 / 10, and 0.25 over sqrt(0.25 + 0.1875) / 10
    assert abs(alarm.evidence["alarm/reward_sigmas"] - 4.714) < 1e-3
    assert abs(alarm.evidence["alarm/judge_sigmas"] - 3.780) < 1e-3
    assert not watch.see(evaluation(6, reward=0.8, judge=0.1))  # said once


def test_a_fall_after_a_gain_is_seen_against_the_best_evaluation() -> None:
    lines = [
        evaluation(0, reward=0.3, judge=0.4),
        evaluation(2, reward=0.5, judge=0.7),
        evaluation(4, reward=0.7, judge=0.45),
    ]
    assert names(lines) == [("reward_and_judge", 4)]


def test_both_rising_both_falling_and_chance_raise_nothing() -> None:
    assert not names([evaluation(0, reward=0.3, judge=0.4), evaluation(2, reward=0.6, judge=0.7)])
    assert not names([evaluation(0, reward=0.6, judge=0.7), evaluation(2, reward=0.3, judge=0.4)])
    few = {"num": 10}
    assert not names(
        [evaluation(0, reward=0.3, judge=0.5, **few), evaluation(2, reward=0.6, judge=0.4, **few)]
    )


def test_limits_must_be_passed_for_some_steps_in_a_row() -> None:
    high = {"kl__reference": 2.0}
    lines = [
        train(1, **high),
        train(2, **high),
        train(3, kl__reference=0.1),
        *(train(s, **high) for s in (4, 5, 6)),
    ]
    assert names(lines) == [("kl", 6)]
    equal = [train(step, samples__equal_groups_fraction=1.0) for step in range(1, 4)]
    assert names(equal) == [("equal_groups", 3)]
    same = [train(step, samples__commonest_fraction=0.6) for step in range(1, 4)]
    assert names(same) == [("same_answer", 3)]
    longer = [train(step, rollout__length=2.0 * 2**step) for step in range(6)]
    assert names(longer) == [("length", 4)]


def test_missing_numbers_and_old_lines_raise_nothing() -> None:
    old = {
        "kind": "eval",
        "stage": "a",
        "direction": "text",
        "step": 0,
        "eval/judge": 0.5,
        "eval/reward": None,
    }
    assert not names([old, old, train(1, kl__reference=float("nan")), {"kind": "alarm"}])


def pictures(step: int, brightness: float, **values: float) -> dict[str, Any]:
    return train(step, samples__brightness=brightness, samples__brightness_std=0.02, **values)


def test_pictures_that_leave_those_of_the_first_step_are_an_alarm() -> None:
    """0.1 darker is five of the first step's deviations."""
    dark = [pictures(1, 0.9), pictures(2, 0.8), pictures(3, 0.8), pictures(4, 0.79)]
    watch = AlarmWatch(AlarmSettings())
    (alarm,) = [alarm for line in dark for alarm in watch.see(line)]
    assert (alarm.name, alarm.step) == ("pictures", 4)
    assert "mean brightness of the pictures went from 0.9 to 0.79, 5.5 of their deviations" in alarm.message
    assert alarm.evidence["alarm/shift"] == pytest.approx(-5.5)
    bright = [pictures(1, 0.5), *(pictures(step, 0.6) for step in (2, 3, 4))]
    assert names(bright) == [("pictures", 4)]


def test_a_small_shift_one_that_turns_and_one_that_does_not_last_raise_nothing() -> None:
    assert not names([pictures(1, 0.9), *(pictures(step, 0.85) for step in range(2, 9))])
    assert not names([pictures(1, 0.5), pictures(2, 0.3), pictures(3, 0.7), pictures(4, 0.3)])
    assert not names([pictures(1, 0.9), pictures(2, 0.6), pictures(3, 0.6), pictures(4, 0.9)])
    alike = [train(step, samples__entropy=3.0 + 0.02 * step, samples__entropy_std=0.0) for step in range(9)]
    assert not names(alike)
