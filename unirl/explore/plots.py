"""Figures of a run. Each function returns a Matplotlib figure of its own and touches no global state.

A figure holds one plot, drawn for a column about 4 inches wide: a page sets them side by side, a phone one
below the other. `INK` and `GRID` are the only colours that depend on the background; a page may exchange
them for its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from unirl.explore.condition import quote_name, quote_text
from unirl.explore.results import phase_names
from unirl.explore.run import Line, Run, number
from unirl.explore.scores import Scores
from unirl.explore.seed_band import seed_band

__all__ = [
    "ALARM",
    "COLOURS",
    "GRID",
    "INK",
    "component_histogram",
    "component_over_steps",
    "finished",
    "learning_curve",
    "lone_dot",
    "memory_use",
    "metric_curves",
    "new_axes",
    "phase_times",
    "reward_and_judge",
    "shown_name",
]

INK = "#1d2733"
GRID = "#d3d9e0"
COLOURS = ("#3f7fd0", "#dd7a2f", "#2f9e76", "#a05fc4", "#d0505f", "#8a8f3a", "#2b9fb0", "#b0708f")
"""For stages and series; visible on white and on near-black."""
ALARM = "#d0505f"
_LEGEND_WIDTH = 50
"""Characters beside each other in a legend; each entry has a line of about six before it."""
_VERDICTS = {"judge accepts": "#2f9e76", "judge rejects": "#d0505f", "not judged": "#8a8f3a"}


def learning_curve(
    run: Run, metric: str = "reward/mean", *, smoothing: float = 0.8, others: Sequence[Run] = ()
) -> Figure:
    """Draw a training metric over the steps, stage by stage: each step faintly, the running mean in full.

    With other runs beside it, such as the same recipe with other seeds, the full line is the mean of all of
    their running means, the band is from the smallest to the largest, and the faint line is this run's.

    Args:
        run: The run; steps whose value is missing or NaN are gaps.
        metric: Name of a metric in the training lines.
        smoothing: Weight of the past in the running mean, in [0, 1); the mean starts anew in each stage.
        others: Runs to draw together with it; stages are matched by name, and steps by their number.
    """
    figure, axes = new_axes(metric)
    for colour, stage in zip(_cycle(), run.stages):
        found = [_stage_series(one, stage, metric) for one in (run, *others)]
        means = [(steps, smooth(values, smoothing)) for steps, values in found]
        faint = means[0] if others else found[0]
        axes.plot(*faint, color=colour, alpha=0.6 if others else 0.35, linewidth=1)
        band = seed_band(means)
        if others:
            axes.fill_between(band.steps, band.low, band.high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(
            band.steps, band.mean, color=colour, linewidth=2, label=shown_name(stage), **lone_dot(band.mean)
        )
    return finished(figure, axes, run)


def metric_curves(run: Run, prefix: str, *, labels: Sequence[str] = (), title: str | None = None) -> Figure:
    """Draw every training metric whose name starts with `prefix`, such as `entropy/`.

    A metric of one modality has the colour of the stage of that name. The count `<prefix>tokens` is left out.

    Args:
        run: The run.
        prefix: How the names begin.
        labels: What may stand behind the prefix; anything if none are given.
        title: Above the figure, instead of the prefix.
    """
    figure, axes = new_axes(title or prefix.rstrip("/"))
    found = [name.removeprefix(prefix) for name in metric_names(run, prefix) if name != f"{prefix}tokens"]
    found = [label for label in found if not labels or label in labels]
    order = [*run.stages, *(label for label in found if label not in run.stages)]
    for colour, label in zip(_cycle(), order):
        if label in found:
            steps, values = _series(run.train, prefix + label)
            axes.plot(steps, values, color=colour, linewidth=1.5, label=shown_name(label), **lone_dot(values))
    return finished(figure, axes, run)


def reward_and_judge(run: Run, direction: str, *, others: Sequence[Run] = ()) -> Figure:
    """Draw the reward and the held-out judge at each evaluation of one direction.

    Both have one scale where the reward lies in [0, 1] as the judge does; else the reward's is on the right.
    With other runs beside it, the lines are means over all, and the bands are from the smallest to the
    largest. A dotted line stands where an alarm was raised.
    """
    figure, axes = new_axes(f"evaluation, direction {direction}")
    judge, reward = (
        seed_band([_eval_series(one, direction, name) for one in (run, *others)])
        for name in ("eval/judge", "eval/reward")
    )
    is_share = bool(np.all((np.nan_to_num(reward.low) >= 0) & (np.nan_to_num(reward.high) <= 1)))
    scale = axes if is_share else _right_scale(axes)
    for shown, colour, marker, label, band in (
        (axes, "#2f9e76", "o", "judge", judge),
        (scale, "#a05fc4", "s", "reward" if is_share else "reward, right scale", reward),
    ):
        if others:
            shown.fill_between(band.steps, band.low, band.high, color=colour, alpha=0.2, linewidth=0)
        shown.plot(band.steps, band.mean, color=colour, marker=marker, markersize=5, linewidth=2, label=label)
        if shown is not axes:  # a legend names the lines of its own axes
            axes.plot([], [], color=colour, marker=marker, markersize=5, linewidth=2, label=label)
    for place, alarm in enumerate(line for line in run.alarms if line.get("direction") == direction):
        label = "" if place else "alarm"
        axes.axvline(number(alarm, "step"), color=ALARM, linewidth=1.2, linestyle=(0, (1, 2)), label=label)
    return finished(figure, axes, run)


def component_over_steps(scores: Scores, measure: str, *, kind: str = "train") -> Figure:
    """Draw how a measure is distributed at each step: mean, the middle half, and from 5 to 95 percent.

    A measure that is near 0 or near 1 has a median that jumps between the two; its mean is the share of ones.
    """
    figure, axes = new_axes(f"{measure} over steps")
    value = f"CAST({quote_name(measure)} AS DOUBLE)"
    found = scores.query(
        f"SELECT step, avg({value}) AS mean, quantile_cont({value}, [0.05, 0.25, 0.75, 0.95]) AS q "
        f"FROM samples WHERE kind = {quote_text(kind)} AND isfinite({value}) GROUP BY step ORDER BY step"
    )
    steps, mean = (found[name].to_numpy() for name in ("step", "mean"))
    levels = np.array(found["q"].to_pylist(), dtype=np.float64).reshape(-1, 4).T
    axes.plot(steps, mean, color=COLOURS[0], linewidth=2, label="mean", **lone_dot(mean))
    for low, high, alpha, label in ((1, 2, 0.3, "middle half"), (0, 3, 0.15, "5 to 95%")):
        axes.fill_between(
            steps, levels[low], levels[high], color=COLOURS[0], alpha=alpha, linewidth=0, label=label
        )
    return finished(figure, axes)


def component_histogram(scores: Scores, measure: str = "reward", *, bins: int = 20) -> Figure:
    """Draw how a measure is distributed where the judge accepts a sample and where it rejects it.

    Samples that the judge did not see are left out, unless it saw none.
    """
    figure, axes = new_axes(f"{measure}, number of samples")
    value = f"CAST({quote_name(measure)} AS DOUBLE)"
    verdict = (
        "CASE WHEN judge IS NULL OR isnan(judge) THEN 'not judged' "
        "WHEN judge >= 0.5 THEN 'judge accepts' ELSE 'judge rejects' END"
        if "judge" in scores.columns
        else "'not judged'"
    )
    found = scores.query(
        f"WITH x AS (SELECT {value} AS v, {verdict} AS verdict FROM samples WHERE isfinite({value})), "
        "seen AS (SELECT * FROM x WHERE verdict <> 'not judged' "
        "OR NOT EXISTS (SELECT * FROM x WHERE verdict <> 'not judged')), "
        "span AS (SELECT min(v) AS low, greatest(max(v) - min(v), 1e-9) AS width FROM seen) "
        f"SELECT verdict, least(floor((v - low) / width * {bins}), {bins - 1}) AS bin, "
        "count(*) AS num, any_value(low) AS low, any_value(width) AS width "
        "FROM seen, span GROUP BY verdict, bin"
    )
    rows = found.to_pylist()
    for name, colour in _VERDICTS.items():
        counts = np.zeros(bins)
        for row in rows:
            if row["verdict"] == name:
                counts[int(row["bin"])] = row["num"]
        if counts.any():
            edges = rows[0]["low"] + rows[0]["width"] * np.arange(bins + 1) / bins
            axes.stairs(counts, edges, fill=True, color=colour, alpha=0.55, label=name)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    return finished(figure, axes, xlabel=measure)


def phase_times(run: Run) -> Figure:
    """Draw the seconds of each step, stacked by phase (`time/rollout_s`, `time/reward_s`, ...)."""
    figure, axes = new_axes("seconds per step")
    names = phase_names(run.train)
    steps = np.array([number(line, "step") for line in run.train])
    edges = np.append(steps - 0.5, steps[-1:] + 0.5)
    bottom = np.zeros(len(steps))
    for colour, name in zip(_cycle(), names):
        values = np.nan_to_num([number(line, name) for line in run.train])
        label = shown_name(name.removeprefix("time/").removesuffix("_s"))
        axes.stairs(bottom + values, edges, baseline=bottom, fill=True, color=colour, label=label)
        bottom = bottom + values
    return finished(figure, axes, run)


def memory_use(run: Run) -> Figure:
    """Draw `memory/*_bytes` over the steps, in GiB."""
    figure, axes = new_axes("memory, GiB")
    for colour, name in zip(_cycle(), metric_names(run, "memory/")):
        steps, values = _series(run.train, name)
        label = shown_name(name.removeprefix("memory/").removesuffix("_bytes"))
        axes.plot(steps, values / 2**30, color=colour, linewidth=1.5, label=label, **lone_dot(values))
    axes.set_ylim(bottom=0)
    return finished(figure, axes, run)


def metric_names(run: Run, prefix: str) -> list[str]:
    """Names of the training metrics that start with `prefix` and have a number somewhere, sorted."""
    names = sorted({name for line in run.train for name in line if name.startswith(prefix)})
    return [name for name in names if any(math.isfinite(number(line, name)) for line in run.train)]


def smooth(values: np.ndarray, weight: float) -> np.ndarray:
    """Return the running mean of float (N,) values with decaying weights, corrected for its start.

    m_t = sum_s weight^(t-s) v_s / sum_s weight^(t-s) over the finite v_s with s <= t. NaN where v_t is not
    finite.
    """
    out = np.full(len(values), math.nan)
    total = mass = 0.0
    for index, value in enumerate(values):
        total, mass = weight * total, weight * mass
        if math.isfinite(value):
            total, mass = total + value, mass + 1.0
            out[index] = total / mass
    return out


def _stage_series(run: Run, stage: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
    return _series([line for line in run.train if line.get("stage") == stage], metric)


def _eval_series(run: Run, direction: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
    return _series([line for line in run.evals if line.get("direction") == direction], metric)


def _right_scale(axes: Axes) -> Axes:
    """Return axes on the same steps whose scale stands on the right."""
    right = axes.twinx()
    right.tick_params(colors=INK, labelsize=8.5, length=0)
    right.spines[:].set_visible(False)
    return right


def _series(lines: Sequence[Line], name: str) -> tuple[np.ndarray, np.ndarray]:
    steps = np.array([number(line, "step") for line in lines], dtype=np.float64)
    return steps, np.array([number(line, name) for line in lines], dtype=np.float64)


def new_axes(title: str) -> tuple[Figure, Axes]:
    """Return a figure with one plot, in the colours and sizes of all of them."""
    figure = Figure(figsize=(4.2, 2.7), layout=ConstrainedLayoutEngine(w_pad=0.09))
    axes = figure.add_subplot()
    axes.set_title(shown_name(title), loc="left", fontsize=10, color=INK, fontweight="bold")
    axes.tick_params(colors=INK, labelsize=8.5, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.yaxis.label.set(color=INK, fontsize=8.5)
    return figure, axes


def finished(figure: Figure, axes: Axes, run: Run | None = None, *, xlabel: str = "step") -> Figure:
    """Name the axis, mark the stages of the run if one is given, and put the legend below the plot."""
    axes.set_xlabel(shown_name(xlabel), color=INK, fontsize=8.5)
    if xlabel == "step":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if run is not None:
        _mark_stages(axes, run)
        _set_limits(axes, run)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles,
            labels,
            loc="upper left",
            bbox_to_anchor=(0, -0.2),
            ncols=max(1, min(4, _LEGEND_WIDTH // (max(map(len, labels)) + 6))),
            fontsize=8.5,
            frameon=False,
            labelcolor=INK,
            borderpad=0,
            borderaxespad=0.4,
            handlelength=1.2,
            columnspacing=1.2,
        )
    if not axes.has_data():
        axes.text(0.5, 0.5, "no numbers yet", transform=axes.transAxes, ha="center", color=INK, fontsize=9)
    return figure


def _mark_stages(axes: Axes, run: Run) -> None:
    """Draw a line where one stage ends and the next begins."""
    for before, after in zip(run.train, run.train[1:]):
        if before.get("stage") != after.get("stage"):
            border = (number(before, "step") + number(after, "step")) / 2
            if math.isfinite(border):
                axes.axvline(border, color=GRID, linewidth=1, linestyle=(0, (4, 3)))


def _set_limits(axes: Axes, run: Run) -> None:
    """Give the figures of a run one range of steps, so that they can be compared by eye."""
    steps = [step for line in (*run.train, *run.evals) if math.isfinite(step := number(line, "step"))]
    if steps and min(steps) < max(steps):
        margin = 0.03 * (max(steps) - min(steps))
        axes.set_xlim(min(steps) - margin, max(steps) + margin)


def lone_dot(values: np.ndarray) -> dict[str, Any]:
    """A line through a single point is invisible; draw the point."""
    return {"marker": "o", "markersize": 5} if np.isfinite(values).sum() == 1 else {}


def shown_name(text: str) -> str:
    """Keep Matplotlib from reading dollar signs as formulas, and a leading underscore as 'no label'.

    A name too long for a legend is cut.
    """
    shown = (text if len(text) <= 40 else text[:39] + "…").replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _cycle() -> tuple[str, ...]:
    return COLOURS * 4
