from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from storage import FeatureStore
from unirl.errors import RolloutError
from unirl.rollout.engine import RolloutRequest
from unirl.rollout.native import NativeEngine
from unirl.trainer.alarms import AlarmSettings
from unirl.trainer.scoring_passes import ScoringPasses
from unirl.trainer.stages import ModalitySettings, Stage
from unirl.types import Rollout

PLAIN = Stage(
    name="s", direction="text", prompts="true", steps=2, algorithm="grpo", updates_per_step=1, kl_coef=0.0
)
UNWATCHED = AlarmSettings(kl=None)


def needed(alarms: AlarmSettings = UNWATCHED, *, stage_step: int = 1, **changes: Any) -> tuple[bool, bool]:
    passes = ScoringPasses.needed(replace(PLAIN, **changes), alarms, stage_step=stage_step)
    return passes.policy, passes.reference


def test_a_single_update_without_divergence_needs_no_pass_before_it() -> None:
    assert needed() == (False, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"updates_per_step": 2},
        {"epochs": 2},
        {"algorithm": "ppo"},
        {"importance": "token"},
        {"entropy_target": 2.0},
        {"image": ModalitySettings(entropy_target=2.0), "direction": "both"},
    ],
    ids=str,
)
def test_what_asks_the_policy_before_the_update(changes: dict[str, Any]) -> None:
    assert needed(**changes) == (True, False)


def test_what_asks_the_reference() -> None:
    assert needed(AlarmSettings()) == (False, True)
    assert needed(kl_coef=0.01) == (False, True)
    assert needed(kl_budget=1.0) == (False, True)
    assert needed(direction="both", image=ModalitySettings(kl_coef=0.1)) == (False, True)


def test_where_agreement_is_tested_both_are_asked() -> None:
    assert needed(stage_step=0) == (True, True)
    assert needed(algorithm="ppo", critic_warmup_steps=3, stage_step=3) == (True, True)


def test_without_the_passes_the_run_is_the_same(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    """Weights, experience and metrics, but for what only the reference knows.

    An entropy target that is never missed asks for the policy's pass and changes nothing else.
    """
    stage = replace(toy.STAGES[0], algorithm="grpo", updates_per_step=1, kl_coef=0.0, kl_in="loss")
    settings = replace(toy.SETTINGS, alarms=UNWATCHED)
    toy.make_trainer(tmp_path / "short", toy_store, stages=[stage], settings=settings).train()
    watched = replace(stage, entropy_target=1e-9)
    toy.make_trainer(tmp_path / "long", toy_store, stages=[watched]).train()
    short, long = toy.metrics_of(tmp_path / "short"), toy.metrics_of(tmp_path / "long")
    assert "kl/reference" in short[2] and "kl/reference" not in short[3]
    for line, other in zip(short, long, strict=True):
        for name in line.keys() - {"entropy/coef"}:
            assert line[name] == other[name], name
    weights, others = toy.weights_of(tmp_path / "short"), toy.weights_of(tmp_path / "long")
    assert all(value.equal(others[name]) for name, value in weights.items())


class Outsider(NativeEngine):
    """After the first step it writes a picture's code where a word belongs."""

    def rollout(self, request: RolloutRequest) -> Rollout:
        rollout = super().rollout(request)
        if self.policy_version:
            rollout.input_ids[0, rollout.prompt_length] = self.policy.vocabulary.grid.offset
        return rollout


def test_a_token_without_probability_is_refused_before_a_weight_moves(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    stage = replace(toy.STAGES[0], algorithm="grpo", updates_per_step=1, kl_coef=0.0)
    policy, after_first = toy.make_policy(), {}

    def on_step(*_: object) -> None:
        after_first.update({name: tensor.clone() for name, tensor in policy.state_dict().items()})

    trainer = toy.make_trainer(
        tmp_path,
        toy_store,
        stages=[stage],
        settings=replace(toy.SETTINGS, alarms=UNWATCHED),
        policy=policy,
        engine=Outsider(policy),
        on_step=on_step,
    )
    with pytest.raises(RolloutError, match="was sampled where the grammar of 'text' does not allow it"):
        trainer.train()
    assert after_first and all(tensor.equal(after_first[n]) for n, tensor in policy.state_dict().items())
