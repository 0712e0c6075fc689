"""What a run achieved: judge and reward before and after each stage, and the time it took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unirl.explore.run import Line, Run, number

__all__ = ["Headline", "StageResult", "StageTime", "headlines", "phase_names", "stage_results", "stage_times"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """Judge and reward around one stage of one seed; fractions in [0, 1], NaN where not measured."""

    stage: str
    seed: str
    judge_before: float
    judge_after: float
    reward_before: float
    reward_after: float
    steps: int

    @property
    def judge_gain(self) -> float:
        """How much the judge's accuracy rose, as a fraction."""
        return self.judge_after - self.judge_before

    @property
    def is_suspect(self) -> bool:
        """Whether the reward rose while the judge fell: the policy may exploit the reward."""
        return self.reward_after > self.reward_before and self.judge_after < self.judge_before


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One stage over all of its seeds. Means and extremes are over the seeds where the value is known."""

    stage: str
    seeds: Sequence[StageResult]

    def mean(self, name: str) -> float:
        """Mean of a field of `StageResult`; NaN where no seed knows it."""
        values = self._known(name)
        return math.fsum(values) / len(values) if values else math.nan

    def spread(self, name: str) -> tuple[float, float]:
        """Smallest and largest value over the seeds; NaN where no seed knows it."""
        values = self._known(name)
        return (min(values), max(values)) if values else (math.nan, math.nan)

    def _known(self, name: str) -> list[float]:
        return [value for seed in self.seeds if math.isfinite(value := getattr(seed, name))]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """How long a stage ran, and how much of it each phase took."""

    stage: str
    steps: int
    wall_s: float
    share: float
    """Part of the time of all stages, in [0, 1]."""
    phases_s: tuple[tuple[str, float], ...]


def stage_results(run: Run) -> list[StageResult]:
    """Return the results of each stage and seed, from `summary.json` or, without it, the evaluations.

    Without a summary, "before" is the last evaluation of the stage's direction ahead of the stage, and
    "after" is the newest one in it.
    """
    rows = run.summary.get("runs")
    if isinstance(rows, list) and rows:
        return [_from_summary(row) for row in rows if isinstance(row, dict)]
    found = []
    for stage in run.stages:
        lines = [line for line in run.train if line.get("stage") == stage]
        inside = [line for line in run.evals if line.get("stage") == stage]
        direction = _direction(stage, lines, inside)
        evals = [line for line in run.evals if line.get("direction", direction) == direction]
        start = number(lines[0], "step")
        before = [line for line in evals if line.get("stage") != stage and not number(line, "step") > start]
        after = [line for line in evals if line.get("stage") == stage]
        found.append(
            StageResult(
                stage=stage,
                seed=str(run.header.get("seed", "")),
                judge_before=_last(before, "eval/judge"),
                judge_after=_last(after, "eval/judge"),
                reward_before=_last(before, "eval/reward"),
                reward_after=_last(after, "eval/reward"),
                steps=len(lines),
            )
        )
    return found


def headlines(run: Run, others: Sequence[Run] = ()) -> list[Headline]:
    """Return the results of each stage, its seeds together, in the order of the stages.

    Args:
        run: The run, whose summary may hold several seeds.
        others: Runs of the same recipe with other seeds.
    """
    stages: dict[str, list[StageResult]] = {}
    for one in (run, *others):
        for result in stage_results(one):
            stages.setdefault(result.stage, []).append(result)
    return [Headline(stage=stage, seeds=seeds) for stage, seeds in stages.items()]


def stage_times(run: Run) -> list[StageTime]:
    """Return the time of each stage; `wall_s` in the metrics counts from the start of the run."""
    found = []
    end_before = 0.0
    for stage in run.stages:
        lines = [line for line in run.train if line.get("stage") == stage]
        clock = [value for line in lines if math.isfinite(value := number(line, "wall_s"))]
        wall_s = max(clock[-1] - end_before, 0.0) if clock else math.nan
        end_before = clock[-1] if clock else end_before
        found.append((stage, len(lines), wall_s, _phases(lines)))
    total = math.fsum(wall_s for _, _, wall_s, _ in found if math.isfinite(wall_s))
    return [
        StageTime(
            stage=stage,
            steps=steps,
            wall_s=wall_s,
            share=wall_s / total if total > 0 and math.isfinite(wall_s) else 1 / len(found),
            phases_s=phases,
        )
        for stage, steps, wall_s, phases in found
    ]


def phase_names(lines: Sequence[Line]) -> list[str]:
    """Names of the metrics that say how many seconds of a step a phase took, sorted.

    They are `time/NAME_s` but for the whole step and for speeds, whose names end in `_per_s`.
    """
    names = sorted({name for line in lines for name in line if name.startswith("time/")} - {"time/step_s"})
    names = [name for name in names if name.endswith("_s") and not name.endswith("_per_s")]
    return [name for name in names if any(math.isfinite(number(line, name)) for line in lines)]


def _from_summary(row: Line) -> StageResult:
    return StageResult(
        stage=str(row.get("stage", "")),
        seed=str(row.get("seed", "")),
        judge_before=number(row, "judge_before"),
        judge_after=number(row, "judge_after"),
        reward_before=number(row, "reward_before"),
        reward_after=number(row, "reward_after"),
        steps=int(row["steps"]) if isinstance(row.get("steps"), int) else 0,
    )


def _direction(stage: str, train: Sequence[Line], evals: Sequence[Line]) -> str:
    """The direction that a stage trains: from its lines, else a stage is named after its direction."""
    named = [
        str(line["direction"]) for line in (*train, *evals) if line.get("direction") not in (None, "both")
    ]
    return stage if stage in named or not named else named[0]


def _phases(lines: Sequence[Line]) -> tuple[tuple[str, float], ...]:
    sums = (
        (name.removeprefix("time/").removesuffix("_s"), [number(line, name) for line in lines])
        for name in phase_names(lines)
    )
    return tuple((name, math.fsum(v for v in values if math.isfinite(v))) for name, values in sums)


def _last(lines: Sequence[Line], name: str) -> float:
    values = [value for line in lines if math.isfinite(value := number(line, name))]
    return values[-1] if values else math.nan
