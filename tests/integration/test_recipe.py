"""The shapes recipe from its files to its report, every part of it cut down to a few steps."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2_5_VLForConditionalGeneration
from transformers.models.janus.modeling_janus import JanusVQVAE

from storage import FeatureStore

FEW = (
    *("data.num_sft=64", "data.num_rl=40", "data.num_eval=32", "num_evaluation_prompts=6"),
    *("tokenizer.steps=8", "sft.steps=6", "reward.steps=6", "tokenizer.batch_size=16", "sft.batch_size=16"),
    *("reward.batch_size=16", "sft.config.width=64", "sft.config.num_layers=2"),
    *("settings.micro_prompts=4", "settings.checkpoint_every=1"),
    *(f"{stage}.{setting}" for stage in ("text", "image") for setting in (
        "steps=2", "prompts_per_step=8", "group_size=2", "updates_per_step=2", "replay_prompts=0"
    )),
)  # fmt: skip
SETTINGS = tuple(argument for setting in FEW for argument in ("--set", setting))
ONE_RANK = (sys.executable, "-m", "recipes.shapes")
TWO_RANKS = (
    *(sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    *("-m", "recipes.shapes"),
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def start(importable: None) -> Callable[..., subprocess.Popen[str]]:
    def start(run: Path, program: tuple[str, ...] = ONE_RANK) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*program, "--run", str(run), *SETTINGS],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "UNIRL_LOG": "INFO"},
        )

    return start


@pytest.fixture(scope="module")
def finished(start: Callable[..., subprocess.Popen[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("recipe") / "run"
    process = start(run)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert f"report: {run / 'report.html'}" in said.replace("\n", "")
    return run


def test_the_run_directory_holds_everything(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} >= {
        *("run.json", "summary.json", "report.html", "metrics.jsonl", "checkpoints", "experience"),
        *("tensorboard", "store", "models"),
    }
    record = json.loads((finished / "run.json").read_text())
    assert record["recipe"] == "shapes" and record["seed"] == 0
    assert record["config"]["data"]["num_sft"] == 64
    assert record["config"]["stages"][0]["steps"] == 2
    assert record["assignments"] == list(FEW)
    assert FeatureStore.open(finished / "store").snapshot.id >= record["snapshot"] > 0
    report = (finished / "report.html").read_text()
    assert "http://" not in report and "https://" not in report


def test_the_summary_says_what_each_stage_did(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert [(run["stage"], run["seed"], run["steps"]) for run in summary["runs"]] == [
        ("text", 0, 2),
        ("image", 0, 2),
    ]
    for run in summary["runs"]:
        for name in ("judge_before", "judge_after", "reward_before", "reward_after"):
            assert 0.0 <= run[name] <= 1.0
        assert run["wall_s"] > 0
    assert summary["total_wall_s"] > 0 and summary["peak_memory_bytes"] > 2**27
    assert (finished / summary["report"]).is_file() and (finished / summary["store"]).is_dir()


def test_every_model_loads_with_transformers(finished: Path) -> None:
    models = finished / "models"
    JanusVQVAE.from_pretrained(models / "tokenizer")
    Qwen2_5_VLForConditionalGeneration.from_pretrained(models / "reward")
    before, after = (
        AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32) for name in ("sft", "policy")
    )
    assert not before.lm_head.weight.equal(after.lm_head.weight)


def test_the_first_step_of_each_stage_agrees_with_its_engine(finished: Path, toy: SimpleNamespace) -> None:
    """PPO-01: equal weights give no divergence and a ratio of one, on the recipe's own models."""
    train = [line for line in toy.metrics_of(finished) if line["kind"] == "train"]
    assert abs(train[0]["kl/reference"]) < 1e-5
    assert all(line["rollout/logprob_gap_max"] < 1e-4 for line in train)
    assert all(math.isfinite(line["policy/loss"]) for line in train)


def test_a_recipe_that_was_killed_again_and_again_ends_as_the_whole_one(
    start: Callable[..., subprocess.Popen[str]], finished: Path, toy: SimpleNamespace, tmp_path: Path
) -> None:
    """SIGKILL as soon as the store, the tokenizer, the reward and two checkpoints are there."""
    run = tmp_path / "run"
    for sign in (
        "store/snapshots",
        "models/tokenizer",
        "models/reward",
        "checkpoints/step-*1",
        "checkpoints/step-*3",
    ):
        process = start(run)
        while not list(run.glob(sign)) and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    process = start(run)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert toy.metrics_of(run) == toy.metrics_of(finished)
    assert toy.experience_of(run) == toy.experience_of(finished)
    weights, others = toy.weights_of(run), toy.weights_of(finished)
    assert all(value.equal(others[name]) for name, value in weights.items())


def test_two_ranks_give_the_losses_of_one(
    start: Callable[..., subprocess.Popen[str]], finished: Path, toy: SimpleNamespace, tmp_path: Path
) -> None:
    process = start(tmp_path / "run", TWO_RANKS)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    for line, other in zip(toy.metrics_of(tmp_path / "run"), toy.metrics_of(finished), strict=True):
        assert line.keys() == other.keys()
        for name, value in line.items():
            assert value == pytest.approx(other[name], abs=1e-5), (line["step"], name)
    assert toy.experience_of(tmp_path / "run").keys() == toy.experience_of(finished).keys()
