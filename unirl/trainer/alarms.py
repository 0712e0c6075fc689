"""Alarms: signs that a reward is being exploited or that training comes apart, each with its evidence.

An alarm is a function of the lines of `metrics.jsonl`, so that a run, its resumed half and its report find
the same ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unirl.trainer.memory_trend import memory_growth

__all__ = ["Alarm", "AlarmSettings", "AlarmWatch"]

_PICTURE_FLOORS = {"brightness": 0.01, "dark_fraction": 0.02, "entropy": 0.1, "edges": 0.005}
"""Picture statistics, each with the least deviation that a shift is measured in: pictures that are all alike
at the start may come to differ."""

_MEMORY = {
    "memory/rss_bytes": "the memory of the process",
    "memory/gpu_bytes": "the memory in use on the GPU",
}

Line = Mapping[str, Any]
"""One line of `metrics.jsonl`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmSettings:
    """When an alarm is raised, and whether it stops the run."""

    stop: bool = False
    """End the run at the first alarm, with its state saved."""
    sigmas: float = 2.5
    """How many standard errors the reward must have risen and the judge fallen between two evaluations."""
    steps: int = 3
    """Steps in a row for which the limits below must be passed."""
    equal_groups_fraction: float = 0.95
    """Most prompts that may have G equal samples."""
    commonest_fraction: float = 0.5
    """Largest share of a step's samples that may be the same one."""
    kl: float | None = 1.0
    """Largest divergence from the reference, nats a token. None watches none; where it is not charged
    either, the reference is not run."""
    length_factor: float = 3.0
    """Largest mean length, as a multiple of that of the stage's first step."""
    picture_shift: float = 3.0
    """How many deviations of the stage's first samples the mean of a picture statistic may move."""
    memory_growth_bytes: float = 200e6
    """How much more memory may be held than `memory_steps` steps ago, if it grew all the time."""
    memory_steps: int = 20
    """4 or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One alarm."""

    name: str
    """reward_and_judge, equal_groups, same_answer, kl, length, pictures, memory or checkpoint."""
    stage: str
    direction: str
    step: int
    message: str
    """What was found, in one sentence."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The numbers behind it."""


class AlarmWatch:
    """Reads the lines of a run in their order. Each alarm is raised once in a stage and direction.

    Args:
        settings: When to raise.
    """

    def __init__(self, settings: AlarmSettings) -> None:
        self.settings = settings
        self.raised: list[Alarm] = []
        self._evaluations: dict[str, list[Line]] = {}
        self._steps: dict[tuple[str, str], list[Line]] = {}
        self._latest: deque[Line] = deque(maxlen=settings.memory_steps)

    def see(self, line: Line) -> list[Alarm]:
        """Take in one line; return the alarms that it raises."""
        if line["kind"] == "eval":
            earlier = self._evaluations.setdefault(line["direction"], [])
            found = _reward_and_judge(earlier, line, self.settings)
            earlier.append(line)
        elif line["kind"] == "train":
            steps = self._steps.setdefault((line["stage"], line["direction"]), [])
            steps.append(line)
            self._latest.append(line)
            found = _limits(steps, self.settings) + _pictures(steps, self.settings)
            found += _memory(self._latest, self.settings)
        else:
            return []
        known = {(alarm.name, alarm.stage, alarm.direction) for alarm in self.raised}
        new = [alarm for alarm in found if (alarm.name, alarm.stage, alarm.direction) not in known]
        self.raised += new
        return new


def _reward_and_judge(earlier: Sequence[Line], line: Line, settings: AlarmSettings) -> list[Alarm]:
    """The reward has risen and the judge has fallen since some evaluation, both by more than chance.

    Source: the two-sample z statistic; the judge's deviation is that of a yes or no, sqrt(p (1 - p)).
    """
    now = _evaluation(line)
    if now is None:
        return []
    for before in earlier:
        then = _evaluation(before)
        if then is None:
            continue
        rise = _sigmas(then[0], now[0])
        fall = -_sigmas(then[1], now[1])
        if rise > settings.sigmas and fall > settings.sigmas:
            (reward_then, _, _), (judge_then, _, _) = then
            (reward_now, _, _), (judge_now, _, _) = now
            return [
                Alarm(
                    name="reward_and_judge",
                    stage=line["stage"],
                    direction=line["direction"],
                    step=line["step"],
                    message=(
                        f"since step {before['step']} the reward of held-out prompts rose from "
                        f"{reward_then:.3g} to {reward_now:.3g} and the judge fell from {judge_then:.1%} to "
                        f"{judge_now:.1%}: the policy is pleasing the reward, look at its best samples"
                    ),
                    evidence={
                        "alarm/since_step": float(before["step"]),
                        "alarm/reward_before": reward_then,
                        "alarm/reward_after": reward_now,
                        "alarm/judge_before": judge_then,
                        "alarm/judge_after": judge_now,
                        "alarm/reward_sigmas": rise,
                        "alarm/judge_sigmas": fall,
                    },
                )
            ]
    return []


Moments = tuple[float, float, float]
"""Mean, deviation and number."""


def _evaluation(line: Line) -> tuple[Moments, Moments] | None:
    """Reward and judge of an evaluation; None where a number is missing."""
    names = ("eval/reward", "eval/reward_std", "eval/judge", "eval/num")
    reward, deviation, judge, num = (line.get(name) for name in names)
    if reward is None or deviation is None or judge is None or num is None:
        return None
    return (reward, deviation, num), (judge, math.sqrt(judge * (1 - judge)), num)


def _sigmas(before: Moments, after: Moments) -> float:
    """Change of a mean in standard errors; the error is at least that of one sample in the whole number."""
    error = math.hypot(before[1] / math.sqrt(before[2]), after[1] / math.sqrt(after[2]))
    return (after[0] - before[0]) / max(error, 1e-3 / math.sqrt(after[2]))


def _limits(steps: Sequence[Line], settings: AlarmSettings) -> list[Alarm]:
    """Numbers that have been beyond their limits for some steps in a row."""
    length = (steps[0].get("rollout/length") or 0.0) * settings.length_factor
    divergence = math.inf if settings.kl is None else settings.kl
    checks = (
        (
            "equal_groups",
            "samples/equal_groups_fraction",
            settings.equal_groups_fraction,
            "share of prompts whose samples are all the same",
        ),
        (
            "same_answer",
            "samples/commonest_fraction",
            settings.commonest_fraction,
            "share of all samples that are the same one",
        ),
        ("kl", "kl/reference", divergence, "divergence from the reference, nats a token"),
        ("length", "rollout/length", length or math.inf, "mean length of a response, tokens"),
    )
    last = steps[-settings.steps :]
    found = []
    for name, metric, limit, words in checks:
        values = [line.get(metric) for line in last]
        known = [value for value in values if value is not None and value > limit]
        if len(known) < settings.steps:
            continue
        found.append(
            Alarm(
                name=name,
                stage=last[-1]["stage"],
                direction=last[-1]["direction"],
                step=last[-1]["step"],
                message=f"{words}: {known[-1]:.3g}, above {limit:.3g} for {settings.steps} steps",
                evidence={"alarm/value": known[-1], "alarm/limit": limit},
            )
        )
    return found


def _pictures(steps: Sequence[Line], settings: AlarmSettings) -> list[Alarm]:
    """A picture statistic of a step's samples has left those of the stage's first step, all in one direction.

    It is known at each step, where reward and judge are compared at evaluations only.
    """
    first, last = steps[0], steps[-settings.steps :]
    for name, floor in _PICTURE_FLOORS.items():
        metric = f"samples/{name}"
        mean, deviation = first.get(metric), first.get(f"{metric}_std")
        values = [value for value in (line.get(metric) for line in last) if value is not None]
        if mean is None or deviation is None or len(values) < settings.steps:
            continue
        shifts = [(value - mean) / max(deviation, floor) for value in values]
        if min(shifts) <= settings.picture_shift and max(shifts) >= -settings.picture_shift:
            continue
        return [
            Alarm(
                name="pictures",
                stage=first["stage"],
                direction=first["direction"],
                step=last[-1]["step"],
                message=(
                    f"since step {first['step']} the mean {name.replace('_', ' ')} of the pictures went from "
                    f"{mean:.3g} to {values[-1]:.3g}, {abs(shifts[-1]):.1f} of their deviations then, beyond "
                    f"{settings.picture_shift:g} for {settings.steps} steps: look at them"
                ),
                evidence={
                    "alarm/since_step": float(first["step"]),
                    f"alarm/{name}_before": mean,
                    f"alarm/{name}_after": values[-1],
                    "alarm/shift": shifts[-1],
                    "alarm/limit": settings.picture_shift,
                },
            )
        ]
    return []


def _memory(steps: Sequence[Line], settings: AlarmSettings) -> list[Alarm]:
    """The process or its GPU has held more and more for some steps, whatever their stage."""
    for name, words in _MEMORY.items():
        held = [value for value in (line.get(name) for line in steps) if value is not None]
        if len(held) < max(settings.memory_steps, 4):
            continue
        growth = memory_growth(held)
        if growth <= settings.memory_growth_bytes:
            continue
        first, last = steps[0], steps[-1]
        return [
            Alarm(
                name="memory",
                stage=last["stage"],
                direction=last["direction"],
                step=last["step"],
                message=(
                    f"{words} has grown all the time since step {first['step']}, by about "
                    f"{growth / 1e6:.0f} MB to {held[-1] / 1e6:.0f} MB, allowed are "
                    f"{settings.memory_growth_bytes / 1e6:.0f} MB: start the run again before it runs out, "
                    "it goes on from its checkpoint with a new engine"
                ),
                evidence={
                    "alarm/since_step": float(first["step"]),
                    "alarm/growth_bytes": growth,
                    "alarm/value": held[-1],
                    "alarm/limit": settings.memory_growth_bytes,
                },
            )
        ]
    return []
