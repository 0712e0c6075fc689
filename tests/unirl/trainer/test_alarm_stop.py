"""Alarms that stop a run, in the loop itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from unirl.errors import AlarmError
from unirl.policies.token_lm import TokenLM
from unirl.rollout.engine import RolloutRequest
from unirl.rollout.native import NativeEngine
from unirl.trainer.alarms import AlarmSettings
from unirl.types import Rollout


def test_an_alarm_stops_the_run_and_the_next_start_goes_on_to_its_end(
    toy: SimpleNamespace, tmp_path: Path
) -> None:
    """The divergence is always above -1, so the first step of each stage raises an alarm; it is said once."""
    store = toy.make_store(tmp_path / "store")

    def train(run: str, *, stop: bool) -> None:
        alarms = AlarmSettings(stop=stop, kl=-1.0, steps=1)
        settings = replace(toy.SETTINGS, alarms=alarms, checkpoint_every=100)
        toy.make_trainer(tmp_path / run, store, settings=settings).train()

    for step in (1, 4):
        with pytest.raises(AlarmError, match=f"stopped after step {step} by an alarm, state saved: diverg"):
            train("stopped", stop=True)
        assert (tmp_path / "stopped" / "checkpoints" / f"step-{step:08d}").is_dir()
    train("stopped", stop=True)
    train("whole", stop=False)
    lines = toy.metrics_of(tmp_path / "stopped")
    assert lines == toy.metrics_of(tmp_path / "whole")
    assert [line["step"] for line in lines if line["kind"] == "alarm"] == [1, 4]
    ours, whole = (toy.weights_of(tmp_path / run) for run in ("stopped", "whole"))
    assert all(value.equal(whole[name]) for name, value in ours.items())


class Keeping(NativeEngine):
    """An engine that keeps 8 MB after each of its rollouts."""

    def __init__(self, policy: TokenLM) -> None:
        super().__init__(policy)
        self.kept: list[bytes] = []

    def rollout(self, request: RolloutRequest) -> Rollout:
        self.kept.append(b"x" * 8_000_000)
        return super().rollout(request)


def test_vllm_03_an_engine_that_keeps_memory_stops_the_run_before_it_runs_out(
    toy: SimpleNamespace, tmp_path: Path
) -> None:
    """Two rollouts of the engine are a step, so 32 MB or more are kept while four steps pass."""
    alarms = AlarmSettings(stop=True, memory_growth_bytes=32e6, memory_steps=4)
    settings = replace(toy.SETTINGS, alarms=alarms)
    policy = toy.make_policy()
    trainer = toy.make_trainer(
        tmp_path / "run",
        toy.make_store(tmp_path / "store"),
        settings=settings,
        policy=policy,
        engine=Keeping(policy),
    )
    with pytest.raises(
        AlarmError, match=r"stopped after step \d by an alarm, state saved: the memory of the"
    ):
        trainer.train()
