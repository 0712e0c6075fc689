from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from storage import FeatureStore
from unirl.errors import ConfigError
from unirl.trainer.offline import choose_stored, reuse_stored
from unirl.trainer.replay import replay_tokens
from unirl.trainer.stage_checks import check_stages
from unirl.trainer.stages import RunSettings, Stage


@pytest.fixture(scope="module")
def experience(finished_run: Path) -> FeatureStore:
    return FeatureStore.open(finished_run / "experience")


def stage_of(toy: SimpleNamespace, place: int = 0, **changes: Any) -> Stage:
    return replace(toy.STAGES[place], **({"offline_prompts": 4, "importance": "token"} | changes))


def test_stored_groups_are_whole_fresh_enough_and_the_same_every_time(
    toy: SimpleNamespace, experience: FeatureStore
) -> None:
    stage = stage_of(toy, offline_staleness=2)
    groups = choose_stored(experience, stage, step=3, seed=7)
    assert [len(group) for group in groups] == [2] * 4
    for group in groups:
        assert [row["sample"] for row in group] == [0, 1]
        assert len({(row["step"], row["prompt_key"]) for row in group}) == 1
        assert all(row["step"] in (2, 3) and row["stage"] == "text" for row in group)
    keys = [row["key"] for group in groups for row in group]
    assert len(set(keys)) == 8
    again = choose_stored(experience, stage, step=3, seed=7)
    assert [row["key"] for group in again for row in group] == keys
    other = choose_stored(experience, stage, step=3, seed=8)
    assert [row["key"] for group in other for row in group] != keys


def test_too_few_groups_give_none(toy: SimpleNamespace, experience: FeatureStore) -> None:
    assert choose_stored(experience, stage_of(toy), step=0, seed=7) == []
    assert (
        choose_stored(experience, stage_of(toy, offline_staleness=1, offline_prompts=6), step=3, seed=7) == []
    )


@pytest.mark.parametrize("place", [0, 1])
def test_a_reused_rollout_is_the_rollout_of_then(
    toy: SimpleNamespace, toy_store: FeatureStore, experience: FeatureStore, place: int
) -> None:
    """Log-probs of the first step of all are those of the policy that the run began with."""
    stage, policy = stage_of(toy, place), toy.make_policy()
    step = 1 + 3 * place
    groups = choose_stored(experience, stage, step=step, seed=7)
    reused = reuse_stored(
        Accelerator(cpu=True), policy, toy_store, groups, stage, image_size=toy.SIDE, micro_prompts=2
    )
    assert [len(rollout.prompts) for rollout in reused.rollouts] == [2, 2]
    rows = [row for group in groups for row in group]
    assert np.concatenate([s.total for s in reused.scores]).tolist() == [row["reward"] for row in rows]
    assert set(reused.scores[0].components) == {"likes", "constant"}
    keys = [prompt.key for rollout in reused.rollouts for prompt in rollout.prompts]
    assert keys == [group[0]["prompt_key"] for group in groups]
    for rollout in reused.rollouts:
        mask = rollout.response_mask
        assert (rollout.origin.policy_version[mask] == step - 1).all()
        with torch.no_grad():
            logprobs = replay_tokens(policy, policy, rollout, stage.sampling).logprobs
        gap = float((logprobs - rollout.old_logprobs)[mask].abs().max())
        assert gap < 1e-4 if place == 0 else gap > 1e-4


def test_a_run_that_uses_samples_again_goes_on_after_an_interruption(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    stage = stage_of(toy, steps=4, offline_staleness=2)

    def make(run: Path, **options: Any) -> Any:
        settings = replace(toy.SETTINGS, checkpoint_every=1)
        return toy.make_trainer(run, toy_store, stages=(stage,), settings=settings, **options)

    class End(Exception):
        pass

    def end(stage: str, done: int, total: int, metrics: dict[str, float]) -> None:
        if done == 3:
            raise End

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    make(whole).train()
    with pytest.raises(End):
        make(broken, on_step=end).train()
    make(broken).train()
    assert toy.metrics_of(broken) == toy.metrics_of(whole)
    weights = toy.weights_of(whole)
    assert all(value.equal(weights[name]) for name, value in toy.weights_of(broken).items())
    lines = [line for line in toy.metrics_of(whole) if line["kind"] == "train"]
    assert [line.get("offline/age") is None for line in lines] == [True, False, False, False]
    assert all(1 <= line["offline/age"] <= 2 for line in lines[1:])
    assert all(0 < line["offline/weight"] <= stage.importance_limit for line in lines[1:])
    assert all(line["rollout/logprob_gap_max"] < 1e-4 for line in lines)
    fresh = {line["policy/tokens"] for line in lines[:1]}
    assert all(line["policy/tokens"] > max(fresh) * 1.2 for line in lines[1:])
    rows = [row for row in toy.experience_of(whole).values() if row["kind"] == "train"]
    assert len(rows) == 4 * 4 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"importance": "none"}, "importance is none; set importance"),
        ({"offline_prompts": 3}, "offline_prompts 3 is not a multiple of 1 ranks x updates_per_step 2"),
        ({"direction": "both"}, "needs a stage of one direction"),
        ({"offline_staleness": 0}, "offline_staleness must be 1 or more"),
    ],
)
def test_what_cannot_work(toy: SimpleNamespace, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_stages([stage_of(toy, **changes)], RunSettings(micro_prompts=2), world_size=1)
