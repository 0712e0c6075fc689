"""Runs side by side, as a table, as JSON and as a figure."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from unirl.cli.app import app


def call(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["compare", *map(str, arguments)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs that differ in the algorithm of one stage and in the seed."""
    make_run = runpy.run_path(str(Path(__file__).parents[2] / "run_directory.py"))["make_run"]
    folder = tmp_path_factory.mktemp("compare")
    made = []
    for name, seed, algorithm in (("a", 0, "ppo"), ("b", 3, "grpo")):
        run = make_run(folder / name, steps=2)
        record = json.loads((run / "run.json").read_text())
        stages = [{"name": "text", "algorithm": algorithm, "steps": 2}, {"name": "image", "algorithm": "ppo"}]
        config = {"settings": {"seed": seed}, "stages": stages}
        (run / "run.json").write_text(json.dumps({**record, "seed": seed, "config": config}))
        made.append(run)
    return made[0], made[1]


def test_settings_that_differ_and_measures_stand_side_by_side(runs: tuple[Path, Path]) -> None:
    result = call(*runs)
    assert result.exit_code == 0, result.output
    lines = {tuple(line.split()[:2]): line.split() for line in result.output.splitlines() if line.split()}
    assert lines[("text.algorithm", "ppo")] == ["text.algorithm", "ppo", "grpo"]
    assert lines[("settings.seed", "0")] == ["settings.seed", "0", "3"]
    assert "steps" not in result.output, "what is the same is left out"
    assert ("image", "image") in lines and "±" in result.output


def test_json_says_the_same(runs: tuple[Path, Path]) -> None:
    facts = json.loads(call(*runs, "--json").stdout)
    first, second = map(str, runs)
    assert facts["settings"]["text.algorithm"] == {first: "ppo", second: "grpo"}
    assert {row["run"] for row in facts["measures"]} == {first, second}
    judged = [row for row in facts["measures"] if row["measure"] == "judge"]
    assert judged and all(0 <= row["mean"] <= 1 and row["num"] > 0 for row in judged)


def test_a_run_that_is_like_the_other_says_so(runs: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "same").symlink_to(runs[0])
    assert "all settings are the same" in call(runs[0], tmp_path / "same").output


def test_a_figure_is_drawn(runs: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "figures" / "curves.png"
    result = call(*runs, "--kind", "train", "--figure", path, "--measure", "reward/length")
    assert result.exit_code == 0 and str(path) in result.output
    assert Image.open(path).width > 300
    wrong = call(*runs, "--figure", tmp_path / "x.png", "--measure", "lenght")
    assert wrong.exit_code == 1 and "measures are" in str(wrong.exception)
