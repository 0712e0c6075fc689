from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch

from storage import FeatureStore
from unirl.errors import ConfigError, RewardError, RolloutError
from unirl.policies.policy import Policy
from unirl.rollout.native import NativeEngine
from unirl.trainer.checkpoint import newest_checkpoint
from unirl.trainer.loop import StopAsked, Trainer
from unirl.trainer.stages import AlgorithmName
from unirl.types import Sample, Scores

STEPS = 6


class Killed(Exception):
    """Stands for a kill: nothing after it runs."""


def assert_same_run(toy: SimpleNamespace, left: Path, right: Path) -> None:
    assert toy.metrics_of(left) == toy.metrics_of(right)
    assert toy.experience_of(left) == toy.experience_of(right)
    weights, others = toy.weights_of(left), toy.weights_of(right)
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        assert value.equal(others[name]), name


def train_until(toy: SimpleNamespace, run: Path, store: FeatureStore, step: int) -> None:
    """Train and drop everything right after a step's line is in the log."""
    trainer: Trainer

    def on_step(stage: str, done: int, total: int, metrics: Mapping[str, float]) -> None:
        if trainer.position.step == step:
            raise Killed

    trainer = toy.make_trainer(run, store, on_step=on_step)
    with pytest.raises(Killed):
        trainer.train()


def test_lines_of_the_log_come_in_order(finished_run: Path) -> None:
    lines = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    seen = [
        (line["kind"], line["stage"], line["direction"], line["step"], line["stage_step"]) for line in lines
    ]
    assert seen == [
        ("eval", "start", "text", 0, 0),
        ("eval", "start", "image", 0, 0),
        *(("train", "text", "text", n, n) for n in (1, 2, 3)),
        ("eval", "text", "text", 3, 3),
        ("eval", "text", "image", 3, 3),
        *(("train", "image", "image", n + 3, n) for n in (1, 2, 3)),
        ("eval", "image", "text", 6, 3),
        ("eval", "image", "image", 6, 3),
    ]
    assert [line["wall_s"] for line in lines] == sorted(line["wall_s"] for line in lines)
    train = [line for line in lines if line["kind"] == "train"]
    needed = {"reward/mean", "reward/likes", "kl/reference", "kl/coef", "policy/loss", "policy/clip_fraction"}
    needed |= {"value/loss", "rollout/length", "rollout/truncated_fraction", "memory/rss_bytes"}
    phases = ("sync", "rollout", "reward", "experience", "update", "log")
    needed |= {f"time/{name}_s" for name in (*phases, "step")} | {f"memory/{name}_bytes" for name in phases}
    for line in train:
        assert needed <= line.keys()
        assert f"entropy/{line['direction']}" in line
        assert all(
            value is None or math.isfinite(value) for value in line.values() if not isinstance(value, str)
        )


def test_the_first_step_of_a_run_stands_on_the_reference(finished_run: Path) -> None:
    """Policy = reference: no divergence, and rollout and trainer agree on every token."""
    lines = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    assert abs(train[0]["kl/reference"]) < 1e-6
    assert all(line["rollout/logprob_gap_max"] < 1e-5 for line in train)
    assert train[-1]["kl/reference"] != 0.0


def test_weights_and_critic_carry_over_to_the_next_stage(
    finished_run: Path, toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    """A run of the first stage alone ends where the second stage of the whole run begins."""
    trainer = toy.make_trainer(tmp_path, toy_store, stages=toy.STAGES[:1])
    trainer.train()
    assert toy.metrics_of(tmp_path) == toy.metrics_of(finished_run)[:7]
    assert trainer.policy.critic.value.weight.any()


def test_the_same_run_twice_is_the_same_run(
    finished_run: Path, toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    torch.manual_seed(99)
    np.random.seed(99)
    toy.make_trainer(tmp_path, toy_store).train()
    assert_same_run(toy, tmp_path, finished_run)


def test_another_seed_is_another_run(
    finished_run: Path, toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    toy.make_trainer(tmp_path, toy_store, settings=replace(toy.SETTINGS, seed=4)).train()
    assert toy.metrics_of(tmp_path) != toy.metrics_of(finished_run)


@pytest.mark.parametrize("step", [1, 3, 4, 6])
def test_a_run_that_was_cut_after_a_step_ends_as_the_uncut_one(
    finished_run: Path, toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path, step: int
) -> None:
    """Before the first checkpoint, at one, right behind one, in each stage."""
    train_until(toy, tmp_path, toy_store, step)
    toy.make_trainer(tmp_path, toy_store).train()
    assert_same_run(toy, tmp_path, finished_run)


def test_a_run_that_was_cut_again_and_again_ends_as_the_uncut_one(
    finished_run: Path, toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    for step in (2, 3, 5):
        train_until(toy, tmp_path, toy_store, step)
    toy.make_trainer(tmp_path, toy_store).train()
    assert_same_run(toy, tmp_path, finished_run)


def test_a_damaged_checkpoint_costs_steps_and_nothing_else(
    finished_run: Path, toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    train_until(toy, tmp_path, toy_store, 5)
    newest = newest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None and newest.name == "step-00000004"
    (newest / "policy.safetensors").write_bytes(b"")
    trainer = toy.make_trainer(tmp_path, toy_store)
    assert trainer.position.step == 3
    trainer.train()
    assert_same_run(toy, tmp_path, finished_run)


def test_a_finished_run_has_nothing_left_to_do(
    finished_run: Path, toy: SimpleNamespace, toy_store: FeatureStore
) -> None:
    before = toy.metrics_of(finished_run)
    snapshots = len(FeatureStore.open(finished_run / "experience").snapshots())
    toy.make_trainer(finished_run, toy_store).train()
    assert toy.metrics_of(finished_run) == before
    assert len(FeatureStore.open(finished_run / "experience").snapshots()) == snapshots


def test_a_stop_request_is_honoured_after_the_step_and_the_run_goes_on(
    finished_run: Path, toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    steps: list[int] = []

    def on_step(stage: str, done: int, total: int, metrics: Mapping[str, float]) -> None:
        steps.append(done)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StopAsked, match=r"stopped after step 1, state saved in .*checkpoints"):
        toy.make_trainer(tmp_path, toy_store, on_step=on_step).train()
    assert steps == [1]
    assert newest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step-00000001"
    toy.make_trainer(tmp_path, toy_store).train()
    assert_same_run(toy, tmp_path, finished_run)


def test_evaluations_inside_a_stage(toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path) -> None:
    settings = replace(toy.SETTINGS, evaluate_every=1)
    toy.make_trainer(tmp_path, toy_store, stages=toy.STAGES[:1], settings=settings).train()
    seen = [(line["stage"], line["step"]) for line in toy.metrics_of(tmp_path) if line["kind"] == "eval"]
    assert seen == [pair for pair in [("start", 0), ("text", 1), ("text", 2), ("text", 3)] for _ in range(2)]
    kinds = [key for key in toy.experience_of(tmp_path) if key.startswith("eval/text/text/")]
    assert len(kinds) == 3 * 8


def test_the_size_of_micro_batches_changes_nothing(
    finished_run: Path, toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    toy.make_trainer(tmp_path, toy_store, settings=replace(toy.SETTINGS, micro_prompts=4)).train()
    for line, other in zip(toy.metrics_of(tmp_path), toy.metrics_of(finished_run), strict=True):
        for name in ("reward/mean", "policy/loss", "value/loss", "kl/reference", "eval/reward", "eval/judge"):
            assert line.get(name) == pytest.approx(other.get(name), abs=2e-5), (line["step"], name)
    weights, others = toy.weights_of(tmp_path), toy.weights_of(finished_run)
    for name, value in weights.items():
        if name.startswith("policy/"):
            torch.testing.assert_close(value, others[name], atol=2e-5, rtol=0)


def test_the_kl_coefficient_moves_towards_its_target(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    """Far below the target it falls by a fifth of num / horizon a step, far above it rises by as much."""
    for name, target, factor in (("low", 1e6, 0.8), ("high", 1e-9, 1.2)):
        stage = replace(
            toy.STAGES[0], kl_target=target, kl_horizon=toy.STAGES[0].samples_per_step, kl_coef=0.5
        )
        toy.make_trainer(tmp_path / name, toy_store, stages=[stage]).train()
        coefficients = [
            line["kl/coef"] for line in toy.metrics_of(tmp_path / name) if line["kind"] == "train"
        ]
        assert coefficients[0] == 0.5
        assert coefficients[2] == pytest.approx(coefficients[1] * factor)


@pytest.mark.parametrize("algorithm", [name for name in get_args(AlgorithmName) if name != "ppo"])
def test_every_algorithm_trains_both_stages(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path, algorithm: AlgorithmName
) -> None:
    """It moves the policy and, without a critic, leaves the critic as it is."""
    stages = [replace(stage, algorithm=algorithm, steps=2, kl_target=None) for stage in toy.STAGES]
    trainer = toy.make_trainer(tmp_path, toy_store, stages=stages, reward=toy.Likes(unscored=5))
    before = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    trainer.train()
    after = trainer.policy.state_dict()
    assert after["critic.value.weight"].equal(before["critic.value.weight"])
    assert not after["lm.lm_head.weight"].equal(before["lm.lm_head.weight"])
    lines = [line for line in toy.metrics_of(tmp_path) if line["kind"] == "train"]
    assert [line["stage"] for line in lines] == ["text", "text", "image", "image"]
    for line in lines:
        assert math.isfinite(line["policy/loss"]) and line["kl/coef"] == stages[0].kl_coef


def test_unscored_samples_are_counted_and_left_out(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    toy.make_trainer(tmp_path, toy_store, reward=toy.Likes(unscored=4)).train()
    lines = [line for line in toy.metrics_of(tmp_path) if line["kind"] == "train"]
    for line in lines:
        assert line["reward/unscored_fraction"] == 0.25
        assert math.isfinite(line["policy/loss"]) and math.isfinite(line["reward/mean"])
    rows = toy.experience_of(tmp_path)
    unscored = [row for key, row in rows.items() if key.startswith("train/") and row["reward"] is None]
    assert len(unscored) == STEPS * 2
    assert all(row["advantage"] == 0.0 for row in unscored)


class _Nothing:
    def score(self, samples: list[Sample]) -> Scores:
        return Scores(total=np.full(len(samples), np.nan))


def test_a_step_without_a_single_score_is_an_error(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    with pytest.raises(RewardError, match="no sample of this step could be scored"):
        toy.make_trainer(tmp_path, toy_store, reward=_Nothing()).train()


def test_an_engine_that_disagrees_with_the_trainer_is_refused(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    """Other weights in the engine than in the trainer: the first step says so."""

    class Stale(NativeEngine):
        def sync(self, policy: Policy, version: int) -> None:
            super().sync(toy.make_policy(seed=9), version)

    trainer = toy.make_trainer(tmp_path, toy_store, engine=Stale(toy.make_policy()))
    with pytest.raises(RolloutError, match=r"stage text, first step: rollout and trainer differ by .* nats"):
        trainer.train()


def test_a_run_that_cannot_work_leaves_nothing_behind(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="prompts_per_step 3 is not a multiple"):
        toy.make_trainer(tmp_path, toy_store, stages=[replace(toy.STAGES[0], prompts_per_step=3)])
    assert list(tmp_path.iterdir()) == []


def test_the_reference_never_moves(toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path) -> None:
    trainer = toy.make_trainer(tmp_path, toy_store)
    trainer.train()
    start, reference = toy.make_policy().lm.state_dict(), trainer.reference.lm.state_dict()
    assert all(value.equal(start[name]) for name, value in reference.items())
    assert not any(p.requires_grad for p in trainer.reference.parameters())


def test_rewards_rise(toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path) -> None:
    """Words of the true caption are liked, and "and" stands in all of them: the policy soon writes it."""
    stage = replace(toy.STAGES[0], steps=12, group_size=8, learning_rate=1e-2, kl_coef=0.0)
    settings = replace(toy.SETTINGS, checkpoint_every=100)
    toy.make_trainer(tmp_path, toy_store, stages=[stage], settings=settings).train()
    rewards = [line["reward/mean"] for line in toy.metrics_of(tmp_path) if line["kind"] == "train"]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2, rewards
