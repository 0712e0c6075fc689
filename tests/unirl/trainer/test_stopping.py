from __future__ import annotations

from dataclasses import replace

import pytest

from unirl.trainer.evaluate import Quality
from unirl.trainer.stages import Stage
from unirl.trainer.stopping import Stopping

STAGE = Stage(name="s", direction="text", prompts="true", steps=10)


def reason(stopping: Stopping, steps_done: int) -> str | None:
    end = stopping.end(steps_done)
    return None if end is None else end.reason


def test_without_a_rule_the_steps_decide() -> None:
    stopping = Stopping(STAGE)
    stopping.see_step(99.0)
    for _ in range(5):
        stopping.see_evaluation(Quality(judge=0.1))
    assert reason(stopping, 9) is None
    assert reason(stopping, 10) == "steps"


def test_divergence_over_the_budget_ends_the_stage() -> None:
    stopping = Stopping(replace(STAGE, kl_budget=0.5))
    stopping.see_step(0.5)
    assert reason(stopping, 3) is None
    stopping.see_step(0.51)
    end = stopping.end(4)
    assert end is not None and end.reason == "kl_budget"
    assert end.message == "divergence 0.51 nats a token, kl_budget 0.5"


@pytest.mark.parametrize(
    ("gain", "judgements", "expected"),
    [
        (0.0, [0.2], None),
        (0.0, [0.2, 0.2], None),
        (0.0, [0.2, 0.2, 0.1], "judge_plateau"),
        (0.0, [0.2, 0.1, 0.21, 0.2], None),
        (0.0, [0.2, 0.1, 0.21, 0.2, 0.21], "judge_plateau"),
        (0.05, [0.2, 0.22, 0.24], "judge_plateau"),
        (0.05, [0.2, 0.24, 0.26], None),
    ],
)
def test_two_evaluations_without_a_better_judge(
    gain: float, judgements: list[float], expected: str | None
) -> None:
    stopping = Stopping(replace(STAGE, plateau_evaluations=2, plateau_gain=gain))
    for share in judgements:
        stopping.see_evaluation(Quality(judge=share, reward=0.5))
    assert reason(stopping, 5) == expected


def test_an_evaluation_that_the_judge_could_not_do_is_left_out() -> None:
    stopping = Stopping(replace(STAGE, plateau_evaluations=1))
    for judge in (0.3, 0.4, None):
        stopping.see_evaluation(Quality(judge=judge, reward=0.0))
    assert reason(stopping, 5) is None
    stopping.see_evaluation(Quality(judge=0.35, reward=1.0))
    assert reason(stopping, 5) == "judge_plateau"


def test_the_reward_stands_in_where_there_is_no_judge() -> None:
    stopping = Stopping(replace(STAGE, plateau_evaluations=2))
    for value in (-0.5, -0.4, -0.45):
        stopping.see_evaluation(Quality(reward=value))
    assert stopping.end(5) is None
    stopping.see_evaluation(Quality(reward=-0.4))
    end = stopping.end(5)
    assert end is not None and end.reason == "reward_plateau"
    assert end.message == "the reward has not gained 0 in 2 evaluations, its best is -0.4"


def test_state_goes_over() -> None:
    stopping, other = (Stopping(replace(STAGE, plateau_evaluations=1, kl_budget=1.0)) for _ in range(2))
    for share in (0.2, 0.1):
        stopping.see_evaluation(Quality(judge=share, reward=0.5))
    stopping.see_step(0.3)
    other.load_state_dict(stopping.state_dict())
    assert other.end(1) == stopping.end(1) is not None
