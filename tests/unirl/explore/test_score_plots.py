from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from unirl.errors import ConfigError
from unirl.explore import (
    Scores,
    agreement_matrix,
    agreement_over_steps,
    calibration_curve,
    drift,
    drift_over_steps,
    open_run,
    prompt_history,
    reward_and_judge,
    run_alarms,
    runs_side_by_side,
    write_report,
)
from unirl.explore.report import render_report
from unirl.trainer.alarms import AlarmSettings


def drawn(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def test_drift_has_a_line_for_each_stage(scores: Scores) -> None:
    lines = drift_over_steps(scores, measures=["reward/vlm"]).axes[0].get_lines()
    assert [list(line.get_xdata()) for line in lines] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    shown = np.concatenate([line.get_ydata() for line in lines])
    np.testing.assert_array_equal(shown, drift(scores, measures=["reward/vlm"])["distance"].to_numpy())


def test_the_matrix_has_the_correlation_of_each_pair(scores: Scores) -> None:
    values = np.ma.filled(agreement_matrix(scores).axes[0].images[0].get_array(), np.nan)
    both = scores.where("isfinite(reward/vlm) and isfinite(judge)").to_arrow(["reward/vlm", "judge"])
    expected = np.corrcoef(both["reward/vlm"].to_numpy(), both["judge"].to_numpy())[0, 1]
    names = scores.measures
    assert values[names.index("reward/vlm"), names.index("judge")] == pytest.approx(expected)
    np.testing.assert_array_equal(values, values.T)


def test_a_history_shows_every_sample_by_its_verdict(scores: Scores) -> None:
    figure = prompt_history(scores, "p1")
    assert sum(len(dots.get_offsets()) for dots in figure.axes[0].collections) == 36
    with pytest.raises(ConfigError, match="p0, p1, p2"):
        prompt_history(scores, "q")
    with pytest.raises(ConfigError, match="no measure 'kl'; measures are reward, "):
        prompt_history(scores, "p1", "kl")


def test_two_runs_are_drawn_on_one_scale(scores: Scores) -> None:
    figure = runs_side_by_side({"a": scores, "b": scores.where("step <= 4")})
    first, second = figure.axes[0].get_lines()
    assert (len(first.get_xdata()), len(second.get_xdata())) == (8, 4)
    np.testing.assert_array_equal(first.get_ydata()[:4], second.get_ydata())
    with pytest.raises(ConfigError, match="run 'a': no column 'reward/x'"):
        runs_side_by_side({"a": scores}, "reward/x")


def test_every_figure_is_drawn_for_no_samples(scores: Scores) -> None:
    nothing = scores.where("step < 0")
    for figure in (
        drift_over_steps(nothing),
        agreement_matrix(nothing),
        agreement_over_steps(nothing),
        agreement_over_steps(scores),
        calibration_curve(nothing, ("reward", "reward/vlm")),
        runs_side_by_side({"a": nothing}),
    ):
        assert drawn(figure).startswith(b"\x89PNG")


def test_alarms_are_found_and_shown(run_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    place = {"kind": "alarm", "stage": "image", "direction": "image", "step": 6}
    words = {"alarm": "same_answer", "message": "all samples are <b>one</b>", "alarm/value": 0.875}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(place | words) + "\n")
    (alarm,) = run_alarms(open_run(run)).to_pylist()
    assert (alarm["step"], alarm["alarm"], alarm["evidence"]) == (6, "same_answer", [("alarm/value", 0.875)])
    lines = reward_and_judge(open_run(run), "image").axes[0].get_lines()
    assert [6.0, 6.0] in [list(line.get_xdata()) for line in lines]
    page = write_report(run).read_text()
    assert "<h2>Alarms</h2>" in page and "same answer" in page and "value 0.875" in page
    assert "all samples are &lt;b&gt;one&lt;/b&gt;" in page


def test_other_limits_find_other_alarms_and_a_quiet_run_has_none(run_dir: Path) -> None:
    run = open_run(run_dir)
    assert run_alarms(run).num_rows == 0
    found = run_alarms(run, AlarmSettings(kl=0.025, steps=2)).to_pylist()
    assert [(alarm["alarm"], alarm["stage"], alarm["step"]) for alarm in found] == [
        ("kl", "text", 4),
        ("kl", "image", 6),
    ]
    assert "<h2>Alarms" not in render_report(run)
