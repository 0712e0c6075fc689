from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.shapes import shapes
from unirl.config import replace_settings
from unirl.errors import ConfigError
from unirl.rewards import Question
from unirl.rewards.train_preference import reward_version
from unirl.trainer.recipe import ModelAlone
from unirl.trainer.run_record import recipe_record
from unirl.trainer.taken_models import take_reward


def test_another_version_is_copied_into_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, out = tmp_path / "reward-3", tmp_path / "run"
    model.mkdir()
    out.mkdir()
    Question(yes=("ja",)).save(model, training={"version": 3})
    with caplog.at_level(logging.INFO, logger="unirl.trainer.taken_models"):
        take_reward(model, out)
    assert Question.load(out) == Question(yes=("ja",))
    assert reward_version(out) == 3
    assert "reward model: version 3 from" in caplog.text


def test_a_folder_without_a_reward_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no reward\.json"):
        take_reward(tmp_path, tmp_path / "out")


def test_a_recipe_names_its_reward_and_its_scoring() -> None:
    recipe = replace_settings(shapes(seed=0), ["reward.model=reward-2"])
    plain = recipe_record(replace(recipe, scoring=ModelAlone()))
    assert plain["reward"]["model"] == "reward-2"
    assert plain["scoring"] == {"class": "ModelAlone"}


def test_a_stage_names_the_scoring_of_its_own() -> None:
    recipe = shapes(seed=0)
    first, *others = recipe.stages
    plain = recipe_record(replace(recipe, stages=(replace(first, scoring=ModelAlone()), *others)))
    assert plain["stages"][0]["scoring"] == {"class": "ModelAlone"}
    assert plain["stages"][1]["scoring"] is None
