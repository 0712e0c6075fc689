"""What the benchmark of the alarms reads out of a run's metrics."""

from __future__ import annotations

from typing import Any

import pytest

from tools.bench.hacking import Outcome, outcome, rows, table


def evaluation(step: int, reward: float, judge: float) -> dict[str, Any]:
    return {
        "kind": "eval",
        "direction": "image",
        "step": step,
        "eval/reward": reward,
        "eval/judge": judge,
    }


def alarm(step: int, name: str) -> dict[str, Any]:
    return {"kind": "alarm", "direction": "image", "step": step, "alarm": name}


def flawed(*alarms: dict[str, Any]) -> Outcome:
    lines = [evaluation(0, -0.9, 0.7), evaluation(3, -0.8, 0.4), evaluation(6, -0.5, 0.0), *alarms]
    return outcome("shapes_hacked", 1, lines)


def test_the_share_of_the_rise_at_the_alarm() -> None:
    found = flawed(alarm(3, "reward_and_judge"), alarm(5, "pictures"))
    assert found.parted == 3 and found.share == pytest.approx(0.25)
    assert found.judge == (0.7, 0.0) and found.best == -0.5
    assert found.alarms == (("reward_and_judge", 3), ("pictures", 5))


def test_a_late_alarm_and_none_are_not_caught_and_an_alarm_of_a_healthy_run_is_counted() -> None:
    healthy = [evaluation(0, 0.5, 0.5), evaluation(3, 0.6, 0.6)]
    runs = [
        flawed(alarm(3, "reward_and_judge")),
        flawed(alarm(6, "reward_and_judge")),
        flawed(),
        outcome("shapes", 0, healthy),
        outcome("shapes", 1, [*healthy, alarm(2, "kl")]),
    ]
    caught, quiet, share = rows(runs)
    assert (caught.value, caught.runs, caught.holds) == (1, 3, False)
    assert (quiet.value, quiet.runs, quiet.holds) == (1, 2, False)
    assert (share.min, share.max, share.holds) == (pytest.approx(0.25), pytest.approx(1.0), False)
    assert "| shapes | 1 | 50.0% -> 60.0% " in table(runs) and "kl (2)" in table(runs)
