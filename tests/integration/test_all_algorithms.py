"""Every algorithm trains the shapes recipe in both directions; one warm-up serves them all."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from recipes.shapes import shapes
from unirl.config import replace_settings
from unirl.trainer.prepare import prepare_run
from unirl.trainer.recipe import Recipe
from unirl.trainer.run import run_recipe
from unirl.trainer.stages import AlgorithmName

FEW = (
    *("data.num_sft=64", "data.num_rl=40", "data.num_eval=32", "num_evaluation_prompts=6"),
    *("tokenizer.steps=8", "sft.steps=12", "reward.steps=6", "tokenizer.batch_size=16", "sft.batch_size=16"),
    *("reward.batch_size=16", "sft.config.width=64", "sft.config.num_layers=2"),
    *("settings.micro_prompts=4", "settings.checkpoint_every=100"),
    *(f"{stage}.{setting}" for stage in ("text", "image") for setting in (
        "steps=4", "prompts_per_step=4", "group_size=4", "updates_per_step=2", "warmup_steps=1"
    )),
)  # fmt: skip

pytestmark = pytest.mark.slow


def recipe_with(algorithm: AlgorithmName) -> Recipe:
    return replace_settings(
        shapes(seed=0), [*FEW, *(f"{stage}.algorithm={algorithm}" for stage in ("text", "image"))]
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("algorithms") / "prepared"
    run.mkdir()
    prepare_run(recipe_with("ppo"), run, seed=0)
    return run


@pytest.mark.parametrize("algorithm", get_args(AlgorithmName))
def test_it_trains_both_directions_without_an_alarm(
    prepared: Path, tmp_path: Path, algorithm: AlgorithmName
) -> None:
    run = tmp_path / "run"
    shutil.copytree(prepared, run)
    summary = run_recipe(recipe_with(algorithm), run, accelerator=Accelerator(cpu=True))
    assert [stage["steps"] for stage in summary["runs"]] == [4, 4]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert not [line["message"] for line in lines if line["kind"] == "alarm"]
    steps = [line for line in lines if line["kind"] == "train"]
    assert len(steps) == 8
    for line in steps:
        assert all(math.isfinite(line[name]) for name in ("reward/mean", "kl/reference", "policy/loss"))
        assert line["policy/grad_norm_max"] > 0
    assert steps[-1]["kl/reference"] != 0.0
    before, after = (load_file(run / "models" / name / "model.safetensors") for name in ("sft", "policy"))
    assert all(not torch.equal(before[name], weight) for name, weight in after.items() if "layers" in name)
