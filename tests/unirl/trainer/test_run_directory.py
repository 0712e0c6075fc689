from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from recipes.numbers import numbers
from unirl.errors import ConfigError
from unirl.trainer.recipe import Recipe
from unirl.trainer.run_directory import RunDirectory, new_directory, write_json
from unirl.trainer.run_record import recipe_defaults, recipe_record

CONFIG: dict[str, Any] = {
    "stages": [{"name": "text", "steps": 3}, {"name": "image", "steps": 4}],
    "sft": {"config": {"width": 32}},
    "widths": [1, 2],
}


def record(path: Path, **changes: Any) -> RunDirectory:
    directory = RunDirectory(path)
    arguments = {"recipe": "shapes", "config": CONFIG, "seed": 1, "assignments": ["text.steps=3"]} | changes
    directory.record(**arguments)
    return directory


def read(path: Path) -> dict[str, Any]:
    return json.loads((path / "run.json").read_text())


@pytest.mark.parametrize(
    ("program", "module", "command"),
    [
        ("unirl", None, "unirl train shapes"),
        ("dots.py", None, "python dots.py train shapes"),
        ("unirl", "recipes.shapes", "python -m recipes.shapes train shapes"),
    ],
)
def test_the_command_names_no_folder_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, module: str | None, command: str
) -> None:
    monkeypatch.setattr(sys, "argv", [f"/home/me/bin/{program}", "train", "shapes"])
    spec = None if module is None else ModuleSpec(module, None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    record(tmp_path / "run")
    assert read(tmp_path / "run")["command"] == command


def test_the_record_lets_somebody_repeat_the_run(tmp_path: Path) -> None:
    record(tmp_path / "run")
    found = read(tmp_path / "run")
    assert found["recipe"] == "shapes" and found["seed"] == 1 and found["config"] == CONFIG
    assert found["assignments"] == ["text.steps=3"]
    assert {"python", "torch", "transformers", "accelerate"} <= found["versions"].keys()
    assert found["command"] and found["created"].endswith("+00:00")
    assert found["commit"] is None or len(found["commit"]) == 40
    assert found["snapshot"] is None


def test_a_run_that_is_continued_keeps_its_record(tmp_path: Path) -> None:
    record(tmp_path)
    before = (tmp_path / "run.json").read_bytes()
    record(tmp_path, seed=2)
    assert (tmp_path / "run.json").read_bytes() == before


def test_the_first_snapshot_stays(tmp_path: Path) -> None:
    directory = record(tmp_path)
    directory.record_store(tmp_path / "store", 4)
    directory.record_store(tmp_path / "store", 9)
    assert directory.snapshot() == 4
    assert read(tmp_path)["store"] == str(tmp_path / "store")


def test_the_same_settings_are_accepted_tuples_or_lists(tmp_path: Path) -> None:
    directory = record(tmp_path)
    directory.check_same(recipe="shapes", config=CONFIG | {"widths": (1, 2)}, seed=1)


def test_a_new_directory_takes_any_run(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "new").check_same(recipe="shapes", config=CONFIG, seed=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "numbers"}, r"a run with recipe = 'shapes', asked for 'numbers'"),
        ({"seed": 2}, r"a run with seed = 1, asked for 2"),
        (
            {"config": CONFIG | {"stages": [{"name": "text", "steps": 3}, {"name": "image", "steps": 5}]}},
            r"a run with config\.stages\.1\.steps = 4, asked for 5",
        ),
        (
            {"config": CONFIG | {"sft": {"config": {"width": 64}}}},
            r"config\.sft\.config\.width = 32, asked for 64",
        ),
        ({"config": CONFIG | {"widths": [1, 2, 4]}}, r"config\.widths\.2 = None, asked for 4"),
        ({"config": CONFIG | {"extra": True}}, r"config\.extra = None, asked for True"),
        (
            {"config": CONFIG | {"stages": [{"name": "text", "steps": 9}, {"name": "image", "steps": 9}]}},
            r"config\.stages\.0\.steps = 3, asked for 9",
        ),
    ],
)
def test_another_run_is_refused_by_the_first_setting_that_differs(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    directory = record(tmp_path)
    arguments = {"recipe": "shapes", "config": CONFIG, "seed": 1} | changes
    with pytest.raises(ConfigError, match=message) as caught:
        directory.check_same(**arguments)
    assert "give the new run another directory" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_record_that_is_no_json_is_said(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json: cannot be read"):
        RunDirectory(tmp_path).check_same(recipe="shapes", config=CONFIG, seed=1)


def test_a_folder_without_a_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run\.json, so there is no run to go on with"):
        RunDirectory(tmp_path / "nothing").read()


def test_json_files_are_whole_or_not_there(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_new_directory_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "models" / "policy"
    with pytest.raises(KeyError), new_directory(path) as folder:
        (folder / "half.txt").write_text("half")
        raise KeyError
    assert list((tmp_path / "models").iterdir()) == []
    (tmp_path / "models" / ".policy.partial").mkdir()
    (tmp_path / "models" / ".policy.partial" / "leftover").write_text("of a kill")
    with new_directory(path) as folder:
        assert not path.exists()
        (folder / "whole.txt").write_text("whole")
    assert [file.name for file in path.iterdir()] == ["whole.txt"]
    assert list((tmp_path / "models").iterdir()) == [path]


def test_an_empty_directory_may_be_there_and_a_full_one_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with new_directory(tmp_path / "empty") as folder:
        (folder / "a").write_text("a")
    assert (tmp_path / "empty" / "a").is_file()
    for taken in (tmp_path / "empty", tmp_path / "empty" / "a"):
        with pytest.raises(ConfigError, match="there is something in it"), new_directory(taken):
            pass


def test_a_run_goes_on_with_its_own_reward_only(tmp_path: Path) -> None:
    directory = record(tmp_path)
    assert read(tmp_path)["reward"] is None
    directory.record_reward(version=2, identity="vlm/1")
    directory.record_reward(version=2, identity="vlm/1")
    assert read(tmp_path)["reward"] == {"version": 2, "identity": "vlm/1"}
    with pytest.raises(ConfigError, match=r"reward version 2 \(vlm/1\), found version 3 \(vlm/2\)"):
        directory.record_reward(version=3, identity="vlm/2")


def begun_by_an_earlier_version(path: Path, recipe: Recipe) -> RunDirectory:
    """A run whose version had no decay of the learning rate, and no alarm of memory."""
    config = recipe_record(recipe)
    for stage in config["stages"]:
        del stage["learning_rate_decay"]
    del config["settings"]["alarms"]["memory_steps"]
    return record(path, recipe=recipe.name, config=config, seed=0)


def test_a_setting_that_an_earlier_version_did_not_have_has_its_default(tmp_path: Path) -> None:
    recipe = numbers()
    directory = begun_by_an_earlier_version(tmp_path, recipe)
    directory.check_same(
        recipe="numbers", config=recipe_record(recipe), seed=0, defaults=recipe_defaults(recipe)
    )


def test_a_setting_that_an_earlier_version_did_not_have_cannot_change(tmp_path: Path) -> None:
    directory = begun_by_an_earlier_version(tmp_path, numbers())
    first, second = numbers().stages
    recipe = replace(numbers(), stages=(first, replace(second, learning_rate_decay="cosine")))
    with pytest.raises(ConfigError, match=r"stages\.1\.learning_rate_decay = 'constant', asked for 'cosine'"):
        directory.check_same(
            recipe="numbers", config=recipe_record(recipe), seed=0, defaults=recipe_defaults(recipe)
        )


@pytest.mark.parametrize("changes", [{"stages": numbers().stages[:1]}, {"reward": None}])
def test_defaults_do_not_stand_in_for_what_a_run_has_not(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory = record(
        tmp_path, recipe="numbers", config=recipe_record(replace(numbers(), **changes)), seed=0
    )
    with pytest.raises(ConfigError, match="asked for"):
        directory.check_same(
            recipe="numbers", config=recipe_record(numbers()), seed=0, defaults=recipe_defaults(numbers())
        )
