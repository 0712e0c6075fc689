"""Figures of what rewards and judge said: drift, agreement, calibration, two runs, and one prompt."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from unirl.errors import ConfigError
from unirl.explore.condition import quote_name, quote_text
from unirl.explore.plots import COLOURS, GRID, INK, finished, lone_dot, new_axes, shown_name
from unirl.explore.scores import Scores
from unirl.explore.statistics import calibration, calibration_error, drift

__all__ = [
    "agreement_matrix",
    "agreement_over_steps",
    "calibration_curve",
    "drift_over_steps",
    "prompt_history",
    "runs_side_by_side",
]

_VERDICTS = {1.0: ("judge accepts", "#2f9e76"), 0.0: ("judge rejects", "#d0505f")}


def drift_over_steps(scores: Scores, *, kind: str = "train", measures: Sequence[str] = ()) -> Figure:
    """Draw how far each measure has moved from the first step of its stage: the `distance` of `drift`."""
    figure, axes = new_axes("drift from the first step of the stage")
    rows = drift(scores, kind=kind, measures=measures).to_pylist()
    names = list(dict.fromkeys(row["measure"] for row in rows))
    for colour, name in zip(itertools.cycle(COLOURS), names):
        mine = [row for row in rows if row["measure"] == name]
        label = _short(name)
        for _, line in itertools.groupby(mine, key=lambda row: (row["stage"], row["direction"])):
            found = list(line)
            distance = np.array([row["distance"] for row in found])
            steps = [row["step"] for row in found]
            axes.plot(
                steps, distance, color=colour, linewidth=_width(name), label=label, **lone_dot(distance)
            )
            label = ""
    axes.set_ylim(0, 1.02)
    return finished(figure, axes)


def agreement_matrix(scores: Scores) -> Figure:
    """Draw the correlation of each pair of the reward, its components and the judge, over all samples.

    A pair is empty where a number is missing or one of the two is constant.
    """
    names = scores.measures
    values = np.full((len(names), len(names)), math.nan)
    casts = [f"CAST({quote_name(name)} AS DOUBLE)" for name in names]
    finite = [f"CASE WHEN isfinite({value}) THEN {value} END" for value in casts]
    pairs = list(itertools.combinations(range(len(names)), 2))
    if pairs:
        found = ", ".join(f"corr({finite[i]}, {finite[j]}) AS c{i}_{j}" for i, j in pairs)
        row = scores.query(f"SELECT {found} FROM samples").to_pylist()[0]
        for i, j in pairs:
            value = row[f"c{i}_{j}"]
            values[i, j] = values[j, i] = math.nan if value is None else value
    figure, axes = new_axes("correlation")
    figure.set_size_inches(1.4 + 0.75 * len(names), 1.0 + 0.55 * len(names))
    axes.imshow(values, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    shown = [_short(name) for name in names]
    axes.set_xticks(range(len(names)), shown, rotation=30, ha="right")
    axes.set_yticks(range(len(names)), shown)
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    for (row, column), value in np.ndenumerate(values):
        if math.isfinite(value):
            colour = "#ffffff" if abs(value) > 0.6 else "#1d2733"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8.5)
    return figure


def agreement_over_steps(scores: Scores) -> Figure:
    """Draw, at each evaluation, how well each measure tells what the judge accepts from what it rejects.

    The number is the AUC of `Scores.agreement`; 0.5, the dashed line, is chance.
    """
    figure, axes = new_axes("agreement with the judge (AUC)")
    rows = [row for row in scores.agreement(by=("step",)).to_pylist() if row["second"] == "judge"]
    for colour, name in zip(itertools.cycle(COLOURS), dict.fromkeys(row["first"] for row in rows)):
        mine = [row for row in rows if row["first"] == name and row["auc"] is not None]
        if mine:
            axes.plot(
                [row["step"] for row in mine],
                [row["auc"] for row in mine],
                color=colour,
                marker="o",
                markersize=4,
                linewidth=_width(name),
                label=_short(name),
            )
    axes.axhline(0.5, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), alpha=0.6)
    axes.set_ylim(-0.02, 1.02)
    return finished(figure, axes)


def calibration_curve(scores: Scores, measures: Sequence[str] = ("reward",), *, bins: int = 10) -> Figure:
    """Draw which share of samples the judge accepts at each height of a measure, with 95% intervals.

    On the dashed line a measure is the probability that the judge accepts. The legend gives the mean distance
    from it, for measures that lie in [0, 1].
    """
    figure, axes = new_axes("share that the judge accepts")
    for colour, name in zip(itertools.cycle(COLOURS), measures):
        table = calibration(scores, name, bins=bins)
        mean, accepted, low, high = (table[n].to_numpy() for n in ("mean", "accepted", "low", "high"))
        if not len(mean):
            continue
        is_probability = mean.min() >= 0 and mean.max() <= 1
        label = f"{_short(name)}, off by {calibration_error(table):.2f}" if is_probability else _short(name)
        axes.fill_between(mean, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(mean, accepted, color=colour, marker="o", markersize=4, linewidth=1.5, label=label)
        if is_probability:
            axes.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=(0, (4, 3)), alpha=0.6)
    axes.set_ylim(-0.02, 1.02)
    return finished(figure, axes, xlabel="measure" if len(measures) > 1 else measures[0])


def runs_side_by_side(runs: Mapping[str, Scores], measure: str = "reward", *, kind: str = "train") -> Figure:
    """Draw the mean of a measure at each step of two runs or more, with its 95% interval.

    Args:
        runs: Scores by the name that the run is to have in the legend.
        measure: A numeric column, for example "judge" with `kind="eval"`.
        kind: "train" or "eval".
    """
    figure, axes = new_axes(f"{measure}, {'training' if kind == 'train' else 'evaluation'}")
    value = f"CAST({quote_name(measure)} AS DOUBLE)"
    for colour, (run, scores) in zip(itertools.cycle(COLOURS), runs.items()):
        if measure not in scores.columns:
            raise ConfigError(
                f"run {run!r}: no column {measure!r}; measures are {', '.join(scores.measures)}"
            )
        table = scores.query(
            f"SELECT step, avg(v) AS mean, coalesce(stddev_samp(v), 0) / sqrt(count(*)) AS error "
            f"FROM (SELECT step, {value} AS v FROM samples WHERE kind = {quote_text(kind)}) "
            "WHERE isfinite(v) GROUP BY step ORDER BY step"
        )
        steps, mean, error = (table[name].to_numpy() for name in ("step", "mean", "error"))
        axes.fill_between(
            steps, mean - 1.96 * error, mean + 1.96 * error, color=colour, alpha=0.2, linewidth=0
        )
        axes.plot(steps, mean, color=colour, linewidth=1.8, label=shown_name(run), **lone_dot(mean))
    return finished(figure, axes)


def prompt_history(scores: Scores, prompt_key: str, measure: str = "reward") -> Figure:
    """Draw a measure of every sample of one prompt over the steps, with their mean and the judge's verdicts.

    Raises:
        ConfigError: If no sample has this prompt, or the measure is none of `Scores.measures`.
    """
    if measure not in scores.measures:
        raise ConfigError(f"no measure {measure!r}; measures are {', '.join(scores.measures)}")
    rows = [row for row in scores.history(prompt_key).to_pylist() if math.isfinite(row[measure] or 0.0)]
    figure, axes = new_axes(f"{measure} of {prompt_key}")
    groups: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row[measure] is not None:
            verdict = _VERDICTS.get(row.get("judge"), ("not judged", COLOURS[0]))
            groups.setdefault(verdict, []).append((row["step"], row[measure]))
    steps = sorted({step for found in groups.values() for step, _ in found})
    every = [pair for found in groups.values() for pair in found]
    mean = np.array([np.mean([value for step, value in every if step == at]) for at in steps])
    axes.plot(steps, mean, color=GRID, linewidth=2, label="mean", **lone_dot(mean))
    for (label, colour), found in groups.items():
        axes.scatter(
            [step for step, _ in found],
            [value for _, value in found],
            s=22,
            zorder=3,
            color=colour,
            alpha=0.8,
            linewidth=0,
            label=label,
        )
    return finished(figure, axes)


def _short(name: str) -> str:
    """A component without the prefix that all components have."""
    return shown_name(name.removeprefix("reward/"))


def _width(name: str) -> float:
    """Wider for the reward, which is seen under the component that it equals where it has only one."""
    return 4.0 if name == "reward" else 1.5
