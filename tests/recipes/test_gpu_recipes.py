"""Recipes for GPUs: complete as they are, and run to their end with random weights of the same classes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from recipes.janus_pro_t2i import janus_pro_t2i
from recipes.joint_llama_text_then_image import joint_llama_text_then_image
from recipes.picture_scoring import PictureScoring
from recipes.tiny_models import TinyJoint
from recipes.vlm_text_grpo import vlm_text_grpo
from storage import FeatureStore
from unirl.cli.runs import recipe_of
from unirl.config import replace_settings
from unirl.errors import ConfigError
from unirl.rewards import Ensemble
from unirl.trainer.recipe import Recipe
from unirl.trainer.run import run_recipe
from unirl.trainer.stage_checks import check_stages

RECIPES = (janus_pro_t2i, joint_llama_text_then_image, vlm_text_grpo)


@pytest.mark.parametrize("function", RECIPES, ids=lambda function: function.__name__)
def test_the_whole_form_is_a_run_that_can_start(function: Callable[..., Recipe]) -> None:
    recipe, tiny = function(seed=5), function(seed=5, tiny=True)
    for made in (recipe, tiny):
        check_stages(made.stages, made.settings, world_size=1)
        assert made.settings.seed == 5
    assert (recipe.name, tiny.name) == (function.__name__, f"{function.__name__}_tiny")
    assert recipe.settings.distribution.mixed_precision == "bf16"
    changed = replace_settings(recipe, ["sft.model=elsewhere", f"{recipe.stages[0].name}.steps=7"])
    assert (changed.sft.model, changed.stages[0].steps) == ("elsewhere", 7)
    same = {"algorithm", "guidance", "guidance_mode", "kl_coef", "clip_high", "importance", "direction"}
    for whole, small in zip(recipe.stages, tiny.stages, strict=True):
        assert {field.name for field in fields(whole)} >= same
        assert all(getattr(whole, name) == getattr(small, name) for name in same)


def test_the_command_line_knows_them_and_their_tiny_forms() -> None:
    known = {entry.name for entry in entry_points(group="unirl.recipes")}
    assert {function.__name__ for function in RECIPES} <= known
    assert recipe_of("janus_pro_t2i_tiny", 0, []).name == "janus_pro_t2i_tiny"
    with pytest.raises(ConfigError, match="recipe shapes has no tiny form"):
        recipe_of("shapes_tiny", 0, [])


def test_a_reward_must_be_named_and_named_once() -> None:
    with pytest.raises(ConfigError, match="no reward is named"):
        PictureScoring().reward(Path("models/reward"))
    with pytest.raises(ConfigError, match="name one of them"):
        PictureScoring(endpoints=("http://127.0.0.1:1/v1",), vqa="here").reward(Path("models/reward"))


def run_tiny(function: Callable[..., Recipe], run: Path) -> list[dict[str, object]]:
    recipe = function(tiny=True)
    summary = run_recipe(recipe, run)
    assert [stage["steps"] for stage in summary["runs"]] == [stage.steps for stage in recipe.stages]
    assert (run / "models" / "policy" / "config.json").is_file()
    rows: list[dict[str, object]] = (
        FeatureStore.open(run / "experience").select("kind = 'train'").to_arrow().to_pylist()
    )
    assert len(rows) == sum(stage.steps * stage.samples_per_step for stage in recipe.stages)
    return rows


@pytest.mark.slow
def test_janus_draws_and_is_scored_by_three_models(tmp_path: Path) -> None:
    rows = run_tiny(janus_pro_t2i, tmp_path / "run")
    names = {"reward/vqa", "reward/similarity", "reward/preference"}
    assert all(isinstance(row[name], float) for row in rows for name in names)
    assert (
        json.loads((tmp_path / "run" / "models" / "policy" / "config.json").read_text())["model_type"]
        == "janus"
    )
    assert (tmp_path / "run" / "models" / "adapters").is_dir()


@pytest.mark.slow
def test_a_joint_llama_writes_and_then_draws(tmp_path: Path) -> None:
    rows = run_tiny(joint_llama_text_then_image, tmp_path / "run")
    assert {row["direction"] for row in rows} == {"text", "image"}


@pytest.mark.slow
def test_a_model_answers_questions_about_pictures(tmp_path: Path) -> None:
    rows = run_tiny(vlm_text_grpo, tmp_path / "run")
    store = FeatureStore.open(tmp_path / "run" / "store")
    asked = set(store.select().column("question").to_pylist())
    assert asked == {"what colour is it ?", "what shape is it ?"}
    assert {row["reward/exact"] for row in rows} <= {0.0, 1.0}
    assert {row["target"] for row in rows} <= {
        "red",
        "green",
        "blue",
        "yellow",
        "circle",
        "square",
        "triangle",
    }


def test_models_in_this_process_make_an_ensemble(tmp_path: Path) -> None:
    TinyJoint().write(tmp_path / "start", seed=0)
    scoring = joint_llama_text_then_image(tiny=True).scoring
    reward = scoring.reward(tmp_path / "reward")
    assert isinstance(reward, Ensemble)
    assert sorted(reward.members) == ["similarity", "vqa"]
