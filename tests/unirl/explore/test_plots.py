from __future__ import annotations

import dataclasses
import io
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from unirl.explore import Scores, plots
from unirl.explore.run import Run, open_run


@pytest.fixture
def run(run_dir: Path) -> Run:
    return open_run(run_dir)


def drawn(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_the_running_mean_is_what_was_worked_by_hand() -> None:
    out = plots.smooth(np.array([1.0, 3.0, math.nan, 2.0]), 0.5)
    # weights of the past: 1; 1/2, 1; then 1/8, 1/4, (gap), 1.
    np.testing.assert_allclose(out, [1.0, 3.5 / 1.5, math.nan, (0.125 + 0.75 + 2.0) / 1.375])


def test_no_smoothing_gives_the_values_back() -> None:
    np.testing.assert_array_equal(plots.smooth(np.array([1.0, 5.0]), 0.0), [1.0, 5.0])


def test_the_learning_curve_has_one_line_per_stage(run: Run) -> None:
    figure = plots.learning_curve(run)
    assert labels(figure) == ["text", "image"]
    raw = figure.axes[0].get_lines()[0]
    np.testing.assert_array_equal(raw.get_xdata(), [1, 2, 3, 4])
    np.testing.assert_array_equal(raw.get_ydata(), [line["reward/mean"] for line in run.train[:4]])


def test_a_modality_keeps_the_colour_of_its_stage(run: Run) -> None:
    def colours(figure: Figure) -> dict[str, str]:
        return {str(line.get_label()): str(line.get_color()) for line in figure.axes[0].get_lines()}

    stages, entropy = colours(plots.learning_curve(run)), colours(plots.metric_curves(run, "entropy/"))
    assert entropy["image"] == stages["image"] != entropy["text"] == stages["text"]


def test_reward_and_judge_are_drawn_from_the_evaluations_of_one_direction(run: Run) -> None:
    figure = plots.reward_and_judge(run, "image")
    judge, reward = figure.axes[0].get_lines()[:2]
    found = [line for line in run.evals if line["direction"] == "image"]
    np.testing.assert_array_equal(judge.get_ydata(), [line["eval/judge"] for line in found])
    np.testing.assert_array_equal(reward.get_ydata(), [line["eval/reward"] for line in found])


def test_the_histogram_counts_every_scored_and_judged_sample_once(scores: Scores) -> None:
    figure = plots.component_histogram(scores, "reward/length", bins=7)
    counted = sum(patch.get_data().values.sum() for patch in figure.axes[0].patches)
    assert counted == scores.where("isfinite(reward/length) and isfinite(judge)").to_arrow(["key"]).num_rows
    assert set(labels(figure)) == {"judge accepts", "judge rejects"}


def test_the_histogram_of_what_nobody_judged_holds_everything(scores: Scores) -> None:
    figure = plots.component_histogram(scores.where("kind = 'train'"))
    assert labels(figure) == ["not judged"]
    assert sum(patch.get_data().values.sum() for patch in figure.axes[0].patches) == 72


def test_counts_of_tokens_are_no_curve(run: Run) -> None:
    assert labels(plots.metric_curves(run, "entropy/")) == ["text", "image"]
    assert labels(plots.metric_curves(run, "kl/", labels=("text", "image"))) == ["text", "image"]


def test_the_mean_over_steps_is_right(scores: Scores) -> None:
    line = plots.component_over_steps(scores, "reward/vlm").axes[0].get_lines()[0]
    first = scores.where("kind = 'train' and step = 1").to_arrow(["reward/vlm"])["reward/vlm"].to_numpy()
    assert line.get_ydata()[0] == pytest.approx(np.mean(first))
    assert list(line.get_xdata()) == list(range(1, 9))


def test_phases_are_stacked(run: Run) -> None:
    top = plots.phase_times(run).axes[0].patches[-1].get_data().values
    np.testing.assert_allclose(top, [2.0] * 8)


@pytest.mark.parametrize("kept", [0, 1])
def test_every_figure_is_drawn_for_a_run_of_no_or_one_step(run: Run, scores: Scores, kept: int) -> None:
    short = dataclasses.replace(run, train=run.train[:kept], evals=run.evals[:kept])
    few = scores.where(f"kind = 'train' and step <= {kept}")
    for figure in (
        plots.learning_curve(short),
        plots.metric_curves(short, "kl/"),
        plots.reward_and_judge(short, "text"),
        plots.component_over_steps(few, "reward"),
        plots.component_histogram(few, "reward"),
        plots.phase_times(short),
        plots.memory_use(short),
    ):
        assert drawn(figure).startswith(b"\x89PNG")


def test_only_nan_is_no_error(run: Run) -> None:
    blank = [dict(line) | {"reward/mean": math.nan} for line in run.train]
    figure = plots.learning_curve(dataclasses.replace(run, train=blank))
    assert drawn(figure).startswith(b"\x89PNG")


def test_names_with_dollars_are_not_read_as_formulas(run: Run) -> None:
    odd = [dict(line) | {"stage": r"_$\bad{$"} for line in run.train]
    figure = plots.learning_curve(dataclasses.replace(run, train=odd))
    assert drawn(figure).startswith(b"\x89PNG")
    assert len(labels(figure)) == 1


def test_no_global_figure_is_left_behind(run: Run) -> None:
    plots.learning_curve(run)
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []
