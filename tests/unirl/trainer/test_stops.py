"""SIGTERM while a run is doing this or that: it stops there, and goes on as if it had not been stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recipes.shapes import shapes
from storage import FeatureStore
from unirl.rollout.engine import RolloutRequest
from unirl.rollout.native import NativeEngine
from unirl.trainer import loop
from unirl.trainer.checkpoint import newest_checkpoint
from unirl.trainer.checkpoint_saver import CheckpointSaver
from unirl.trainer.preemption import StopAsked
from unirl.trainer.run import run_recipe
from unirl.types import Judge, Reward, Rollout, Sample, Scores

CALLS_OF_A_FIRST_EVALUATION = 2


def assert_same_run(toy: SimpleNamespace, left: Path, right: Path) -> None:
    assert toy.metrics_of(left) == toy.metrics_of(right)
    assert toy.experience_of(left) == toy.experience_of(right)
    weights, others = toy.weights_of(left), toy.weights_of(right)
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        assert value.equal(others[name]), name


class Stopping:
    """Sends SIGTERM at one of its calls, and would then never come back."""

    def __init__(self, at: int | None) -> None:
        self.left = -1 if at is None else at
        self.calls = 0

    def call(self) -> None:
        self.calls += 1
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("went on after the request to stop")


class StoppingReward(Stopping):
    def __init__(self, reward: Reward, at: int | None = None) -> None:
        super().__init__(at)
        self.reward = reward

    def score(self, samples: Sequence[Sample]) -> Scores:
        self.call()
        return self.reward.score(samples)


class StoppingJudge(Stopping):
    def __init__(self, judge: Judge, at: int | None = None) -> None:
        super().__init__(at)
        self.judge_ = judge

    def judge(self, samples: Sequence[Sample]) -> np.ndarray:
        self.call()
        return self.judge_.judge(samples)


def stopping_engine(toy: SimpleNamespace, policy: object, at: int) -> NativeEngine:
    class Engine(NativeEngine):
        stopping = Stopping(at)

        def rollout(self, request: RolloutRequest) -> Rollout:
            self.stopping.call()
            return super().rollout(request)

    return Engine(policy)


Where = Callable[[SimpleNamespace], dict[str, object]]


def in_the_reward(at: int) -> Where:
    return lambda toy: {"reward": StoppingReward(toy.Likes(), at)}


def in_an_evaluation(at: int) -> Where:
    return lambda toy: {"judge": StoppingJudge(toy.Even(), at)}


def in_a_rollout(at: int) -> Where:
    def replaced(toy: SimpleNamespace) -> dict[str, object]:
        policy = toy.make_policy()
        return {"policy": policy, "engine": stopping_engine(toy, policy, at)}

    return replaced


@pytest.mark.parametrize(
    ("where", "step"),
    [
        pytest.param(in_the_reward(3), 0, id="reward of the first step"),
        pytest.param(in_the_reward(5), 2, id="reward of the third step"),
        pytest.param(in_a_rollout(4), 0, id="second half of the first rollout"),
        pytest.param(in_a_rollout(12), 3, id="rollout of the second stage"),
        pytest.param(in_an_evaluation(4), 3, id="second half of an evaluation"),
        pytest.param(in_an_evaluation(6), 6, id="last evaluation"),
    ],
)
def test_stopped_anywhere_it_ends_as_the_run_that_was_not(
    finished_run: Path,
    toy: SimpleNamespace,
    toy_store: FeatureStore,
    tmp_path: Path,
    where: Where,
    step: int,
) -> None:
    """Nothing that was done is lost: the checkpoint is of the last whole step."""
    with pytest.raises(StopAsked, match=rf"stopped after step {step}, state saved in .*checkpoints"):
        toy.make_trainer(tmp_path, toy_store, **where(toy)).train()
    newest = newest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None and newest.name == f"step-{step:08d}"
    trainer = toy.make_trainer(tmp_path, toy_store)
    assert trainer.position.step == step
    trainer.train()
    assert_same_run(toy, tmp_path, finished_run)


def test_stopped_before_anything_was_done(
    finished_run: Path, toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    with pytest.raises(StopAsked, match="state not saved: nothing was done yet"):
        toy.make_trainer(tmp_path, toy_store, **in_an_evaluation(2)(toy)).train()
    toy.make_trainer(tmp_path, toy_store).train()
    assert_same_run(toy, tmp_path, finished_run)


def test_a_second_signal_while_the_state_is_saved_changes_nothing(
    finished_run: Path,
    toy: SimpleNamespace,
    toy_store: FeatureStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish = CheckpointSaver._publish

    def impatient(saver: CheckpointSaver, staging: Path, *arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        publish(saver, staging, *arguments)

    with monkeypatch.context() as patch, pytest.raises(StopAsked, match="stopped after step 1, state saved"):
        patch.setattr(CheckpointSaver, "_publish", impatient)
        toy.make_trainer(tmp_path, toy_store, **in_the_reward(4)(toy)).train()
    assert newest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step-00000001"
    toy.make_trainer(tmp_path, toy_store).train()
    assert_same_run(toy, tmp_path, finished_run)


@pytest.mark.parametrize("is_killed", [False, True])
def test_stopped_between_rollout_and_update_nothing_is_scored_again(
    finished_run: Path,
    toy: SimpleNamespace,
    toy_store: FeatureStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_killed: bool,
) -> None:
    """The samples of the step that was stopped are on disk; after a kill so are those of the steps before."""
    calls = 0
    make_experience = loop.make_experience

    def stop(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            if is_killed:
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGTERM)
        return make_experience(*arguments, **options)

    reward = StoppingReward(toy.Likes())
    settings = replace(toy.SETTINGS, checkpoint_every=100)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt if is_killed else StopAsked):
        patch.setattr(loop, "make_experience", stop)
        toy.make_trainer(tmp_path, toy_store, reward=reward, settings=settings).train()
    assert reward.calls == CALLS_OF_A_FIRST_EVALUATION + 2
    again = StoppingReward(toy.Likes())
    trainer = toy.make_trainer(tmp_path, toy_store, reward=again)
    trainer.train()
    assert_same_run(toy, tmp_path, finished_run)
    all_calls = CALLS_OF_A_FIRST_EVALUATION + 6 + 2 * 2
    redone = CALLS_OF_A_FIRST_EVALUATION if is_killed else 0
    assert again.calls == all_calls - reward.calls + redone


class Noisy:
    """A reward of a user that draws from the global generators."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward

    def score(self, samples: Sequence[Sample]) -> Scores:
        total = self.reward.score(samples).total
        return Scores(total=total + np.random.rand(len(total)) + torch.rand(1).item())


def test_a_reward_that_draws_from_the_global_generators_draws_on(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    """Stopped in the second step's reward and in the evaluation behind the third; never stopped."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    torch.manual_seed(1)
    np.random.seed(1)
    toy.make_trainer(whole, toy_store, reward=Noisy(toy.Likes())).train()
    torch.manual_seed(1)
    np.random.seed(1)
    for replaced in (
        {"reward": StoppingReward(Noisy(toy.Likes()), 4)},
        {"reward": Noisy(toy.Likes()), "judge": StoppingJudge(toy.Even(), 1)},
    ):
        with pytest.raises(StopAsked):
            toy.make_trainer(stopped, toy_store, **replaced).train()
        torch.manual_seed(99)
        np.random.seed(99)
    toy.make_trainer(stopped, toy_store, reward=Noisy(toy.Likes())).train()
    assert_same_run(toy, stopped, whole)


def test_a_disk_that_is_full_costs_a_checkpoint_and_raises_an_alarm(
    finished_run: Path,
    toy: SimpleNamespace,
    toy_store: FeatureStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = CheckpointSaver._write_part

    def full(saver: CheckpointSaver, staging: Path, *arguments: object) -> None:
        if "00000002" in staging.name:
            raise OSError(28, "No space left on device")
        write(saver, staging, *arguments)

    monkeypatch.setattr(CheckpointSaver, "_write_part", full)
    toy.make_trainer(tmp_path, toy_store).train()
    lines = toy.metrics_of(tmp_path)
    (alarm,) = [line for line in lines if line["kind"] == "alarm" and line["alarm"] == "checkpoint"]
    assert "training goes on" in alarm["message"] and "No space left on device" in alarm["message"]
    kept = [line for line in lines if line.get("alarm") != "checkpoint"]
    assert kept == toy.metrics_of(finished_run)


def test_seconds_can_be_what_a_checkpoint_is_due_by(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    settings = replace(toy.SETTINGS, checkpoint_every=100, checkpoint_every_s=1e-6, keep_checkpoints=100)
    toy.make_trainer(tmp_path, toy_store, settings=settings, stages=toy.STAGES[:1]).train()
    found = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert found == ["step-00000001", "step-00000002", "step-00000003"]


def test_stopped_while_data_and_models_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the end of a warm-up; what is finished stays."""

    def prepare(recipe: object, run: Path, *, seed: int) -> None:
        (run / "models").mkdir(parents=True)
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("went on after the request to stop")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("unirl.trainer.run.prepare_run", prepare)
    with pytest.raises(StopAsked, match="stopped while preparing, what is finished stays"):
        run_recipe(shapes(), tmp_path / "run")
    assert (tmp_path / "run" / "models").is_dir() and (tmp_path / "run" / "run.json").exists()
    assert signal.getsignal(signal.SIGTERM) is before
