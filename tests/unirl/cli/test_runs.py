from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unirl.cli import main, runs
from unirl.errors import AlarmError
from unirl.trainer.loop import StopAsked
from unirl.trainer.recipe import Recipe
from unirl.trainer.stages import RunSettings, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class NoData:
    rows: int = 7

    def sources(self, directory: Path, *, seed: int) -> Sequence[Path]:
        return []


def toy_recipe(*, seed: int = 0) -> Recipe:
    return Recipe(
        name="toy",
        data=NoData(),  # type: ignore[arg-type]
        tokenizer_rows="true",
        warm_up_rows="true",
        reward_rows="true",
        evaluation_rows="true",
        stages=(
            Stage(name="text", direction="text", prompts="true", steps=5),
            Stage(name="image", direction="image", prompts="true", steps=6),
        ),
        settings=RunSettings(seed=seed),
    )


@dataclass
class Calls:
    """Stands for `run_recipe`: keeps what it was called with."""

    made: list[dict[str, Any]] = field(default_factory=list)
    stop: Exception | None = None

    def __call__(self, recipe: Recipe, run: Path, **options: Any) -> dict[str, Any]:
        self.made.append({"recipe": recipe, "run": run, **options})
        if self.stop is not None:
            raise self.stop
        numbers = {"judge_before": 0.25, "judge_after": 0.5, "reward_before": 0.1, "reward_after": 0.9}
        return {"runs": [{"stage": "text", "steps": 5, "wall_s": 12.3, **numbers}]}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    monkeypatch.setattr(
        runs, "entry_points", lambda group: [SimpleNamespace(name="toy", load=lambda: toy_recipe)]
    )
    monkeypatch.setattr("unirl.trainer.run.run_recipe", made)
    return made


@pytest.fixture
def unirl(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Call the command line; returns exit code, output and error output."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return int(ended.value.code or 0), said.out, said.err

    return call


Unirl = Callable[..., tuple[int, str, str]]


def test_train_runs_the_recipe_with_its_settings(calls: Calls, unirl: Unirl, tmp_path: Path) -> None:
    code, said, _ = unirl(
        *("train", "toy", "--run", str(tmp_path / "r"), "--seed", "4"),
        *("--set", "text.steps=2", "--set", "data.rows=9"),
    )
    assert code == 0
    (call,) = calls.made
    assert call["run"] == tmp_path / "r"
    assert call["assignments"] == ["text.steps=2", "data.rows=9"]
    assert [stage.steps for stage in call["recipe"].stages] == [2, 6]
    assert call["recipe"].settings.seed == 4 and call["recipe"].data.rows == 9
    assert "judge 25.0% -> 50.0%, reward 0.100 -> 0.900, 5 steps in 12 s" in said
    assert str(tmp_path / "r" / "report.html") in said


def test_the_run_goes_to_runs_by_its_recipes_name(calls: Calls, unirl: Unirl) -> None:
    assert unirl("train", "toy")[0] == 0
    assert calls.made[0]["run"] == Path("runs/toy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "tyo"), "error: there is no recipe 'tyo'; did you mean 'toy'?\n"),
        (
            ("train", "toy", "--set", "txt.steps=2"),
            "error: txt.steps: there is no setting 'txt'; did you mean 'text'?\n",
        ),
        (
            ("train", "toy", "--set", "text.setps=2"),
            "error: text.setps: there is no setting 'setps'; did you mean 'steps'?\n",
        ),
        (("train", "toy", "--set", "text.steps=x"), "error: text.steps: found 'x', wanted a whole number\n"),
    ],
)
def test_a_wrong_name_is_one_sentence_with_the_nearest(
    calls: Calls, unirl: Unirl, arguments: tuple[str, ...], message: str
) -> None:
    assert unirl(*arguments) == (1, "", message)
    assert calls.made == []


@pytest.mark.parametrize("arguments", [("trian", "toy"), ("train", "toy", "--seeed", "3"), ("train",)])
def test_wrong_usage_is_said_with_code_2(unirl: Unirl, arguments: tuple[str, ...]) -> None:
    code, _, said = unirl(*arguments)
    assert code == 2
    assert "Usage: unirl" in said and "--help" in said


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [(("trian", "toy"), "Did you mean 'train'?"), (("train", "toy", "--seeed", "3"), "--seed")],
)
def test_wrong_usage_names_the_nearest(unirl: Unirl, arguments: tuple[str, ...], nearest: str) -> None:
    assert nearest in unirl(*arguments)[2]


def test_a_stop_on_request_ends_with_the_code_for_a_requeue(
    calls: Calls, unirl: Unirl, tmp_path: Path
) -> None:
    calls.stop = StopAsked("stopped after step 3, state saved in checkpoints")
    code, _, said = unirl("train", "toy", "--run", str(tmp_path))
    assert code == 75
    assert "stopped after step 3" in said and "the same command goes on from there" in said


def test_a_stop_by_an_alarm_has_a_code_of_its_own(calls: Calls, unirl: Unirl, tmp_path: Path) -> None:
    calls.stop = AlarmError("stopped after step 3 by an alarm, state saved: the judge fell")
    code, _, said = unirl("train", "toy", "--run", str(tmp_path))
    assert code == 4 and "Traceback" not in said
    assert f"{tmp_path}: stopped after step 3 by an alarm" in said.replace("\n", "")


def test_resume_takes_recipe_seed_and_settings_from_the_run(
    calls: Calls, unirl: Unirl, tmp_path: Path
) -> None:
    record = {"recipe": "toy", "seed": 8, "assignments": ["image.steps=1"], "config": {}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert unirl("resume", str(tmp_path))[0] == 0
    (call,) = calls.made
    assert call["recipe"].settings.seed == 8
    assert [stage.steps for stage in call["recipe"].stages] == [5, 1]
    assert call["run"] == tmp_path and call["assignments"] == ["image.steps=1"]
    code, said, _ = unirl("resume", str(tmp_path), "--json")
    assert code == 0 and json.loads(said)["runs"][0]["stage"] == "text"


def test_resume_of_a_folder_without_a_run(calls: Calls, unirl: Unirl, tmp_path: Path) -> None:
    code, _, said = unirl("resume", str(tmp_path))
    assert (code, said) == (1, f"error: {tmp_path}: no run.json, so there is no run to go on with\n")


def test_report_of_a_folder_without_a_run(unirl: Unirl, tmp_path: Path) -> None:
    code, _, said = unirl("report", str(tmp_path / "nothing"))
    assert code == 1
    assert said.startswith("error: ") and len(said.splitlines()) == 1


def test_the_shipped_recipes_are_known_and_can_start() -> None:
    """Their stages are checked on one and on two ranks; the data is not made."""
    from importlib.metadata import entry_points

    from unirl.trainer.stage_checks import check_stages

    recipes = {entry.name: entry.load()(seed=5) for entry in entry_points(group=runs.RECIPES)}
    assert recipes.keys() >= {"numbers", "shapes"}
    for name, recipe in recipes.items():
        assert recipe.name == name and recipe.settings.seed == 5
        for world_size in (1, 2):
            check_stages(recipe.stages, recipe.settings, world_size=world_size)


def test_a_script_gives_its_own_recipes(
    calls: Calls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With every option of the command, and `resume` knows them too."""
    monkeypatch.setattr(runs, "OF_SCRIPT", {})

    def mine(*, seed: int = 0) -> Recipe:
        return replace(toy_recipe(seed=seed), name="mine")

    def call(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments, recipes={"mine": mine})
        return int(ended.value.code or 0), capsys.readouterr().err

    assert call("train", "mine", "--run", str(tmp_path / "r"), "--set", "text.steps=2", "--seed", "3")[0] == 0
    (made,) = calls.made
    assert (made["recipe"].name, made["recipe"].settings.seed) == ("mine", 3)
    assert made["recipe"].stages[0].steps == 2
    (tmp_path / "run.json").write_text(json.dumps({"recipe": "mine", "seed": 8, "config": {}}))
    assert call("resume", str(tmp_path))[0] == 0 and calls.made[1]["recipe"].settings.seed == 8
    code, said = call("train", "mien")
    assert code == 1 and "did you mean 'mine'?" in said


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_rank_alone_says_what_came_out(
    calls: Calls, unirl: Unirl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: str
) -> None:
    """Or a program that reads --json under a launcher is given several documents."""
    monkeypatch.setenv("RANK", rank)
    code, said, _ = unirl("train", "toy", "--run", str(tmp_path / "r"), "--json")
    assert code == 0 and len(said.split('"runs"')) == (2 if rank == "0" else 1)
    assert (logging.getLogger("unirl").level == logging.INFO) == (rank == "0")
    calls.stop = StopAsked("stopped after step 3, state saved in checkpoints")
    code, _, told = unirl("train", "toy", "--run", str(tmp_path / "r"))
    assert code == 75 and bool(told) == (rank == "0")
