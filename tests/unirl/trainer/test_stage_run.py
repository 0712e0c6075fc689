"""What stages carry over, begin with and adapt, and that a run with all of it goes on as if never stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from storage import FeatureStore
from unirl.errors import CheckpointError, ConfigError
from unirl.policies.adapters import add_adapters
from unirl.rollout.engine import RolloutRequest
from unirl.trainer.reference_refresh import (
    is_refresh_due,
    load_reference,
    refresh_reference,
    require_movable,
    save_reference,
)
from unirl.trainer.stage_run import start_anew
from unirl.trainer.stages import ModalitySettings, RunSettings, Stage
from unirl.trainer.true_responses import TrueResponses
from unirl.types import SamplingSettings

STAGE = Stage(name="s", direction="text", prompts="true", steps=9)


class Interrupted(Exception):
    """Stands for whatever ends a process."""


def same_when_interrupted(toy: SimpleNamespace, tmp_path: Path, make: Callable[..., Any], at: int) -> Path:
    """Run once in one go, and once with an end in step `at`; everything must come out the same."""

    def end(stage: str, done: int, total: int, metrics: dict[str, float]) -> None:
        steps.append(done)
        if len(steps) == at:
            raise Interrupted

    steps: list[int] = []
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    make(whole).train()
    with pytest.raises(Interrupted):
        make(broken, on_step=end).train()
    make(broken).train()
    assert toy.metrics_of(broken) == toy.metrics_of(whole)
    assert toy.experience_of(broken) == toy.experience_of(whole)
    weights = toy.weights_of(whole)
    for name, value in toy.weights_of(broken).items():
        assert value.equal(weights[name]), name
    return whole


def lines_of(toy: SimpleNamespace, run: Path, stage: str) -> list[dict[str, Any]]:
    return [line for line in toy.metrics_of(run) if line["kind"] == "train" and line["stage"] == stage]


def test_text_and_pictures_in_one_stage_with_all_that_adapts(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    text = replace(
        toy.STAGES[0],
        steps=4,
        critic_warmup_steps=2,
        critic_warmup_from="data",
        reference_every=3,
        entropy_target=50.0,
        entropy_step=0.001,
    )
    both = replace(
        toy.STAGES[0],
        name="both",
        direction="both",
        steps=3,
        carry=("critic",),
        advantage_norm="modality",
        image=ModalitySettings(loss_weight=0.5, kl_coef=0.3, entropy_target=50.0),
    )

    def make(run: Path, **options: Any) -> Any:
        return toy.make_trainer(
            run,
            toy_store,
            stages=(text, both),
            settings=RunSettings(seed=3, micro_prompts=2, checkpoint_every=1, micro_batch_tokens=40),
            **options,
        )

    run = same_when_interrupted(toy, tmp_path, make, at=6)
    first, second = lines_of(toy, run, "text"), lines_of(toy, run, "both")
    assert [line.get("policy/loss") is None for line in first] == [True, True, False, False]
    assert all(line["value/loss"] > 0 for line in first)
    assert [round(line["entropy/coef"], 6) for line in first] == [0.0, 0.0, 0.0, 0.001]
    assert second[0]["kl/reference"] == pytest.approx(0.0, abs=1e-6)
    assert second[0]["kl/coef_image"] == 0.3
    for line in second:
        assert {"entropy/text", "entropy/image", "kl/text", "kl/image"} <= line.keys()
        assert line["entropy/coef_image"] >= 0
    rows = toy.experience_of(run).values()
    found = [row["direction"] for row in rows if row["stage"] == "both" and row["kind"] == "train"]
    assert found.count("text") == found.count("image") == 3 * 4
    assert len(list((run / "references").glob("*.safetensors"))) <= 3


def test_what_is_not_carried_over_starts_anew(toy: SimpleNamespace) -> None:
    policy = toy.make_policy(seed=1)
    fresh = {name: p.clone() for name, p in policy.critic.named_parameters()}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
    policy(
        torch.ones(2, 6, dtype=torch.int64),
        torch.ones(2, 6, dtype=torch.bool),
        prompt_length=2,
        direction="text",
    ).values.sum().backward()
    optimizer.step()
    before = {name: p.clone() for name, p in policy.named_parameters()}
    start_anew(policy, optimizer, STAGE)
    assert len(optimizer.state) == len(fresh)
    start_anew(policy, optimizer, replace(STAGE, carry=("optimizer", "reference")))
    assert not optimizer.state
    for name, parameter in policy.named_parameters():
        expected = fresh[name.removeprefix("critic.")] if name.startswith("critic.") else before[name]
        assert parameter.equal(expected), name


@pytest.mark.parametrize(
    ("carry", "every", "expected"),
    [
        (("optimizer", "critic", "reference"), 0, []),
        (("optimizer", "critic"), 0, [0]),
        (("reference",), 4, [4, 8]),
        ((), 4, [0, 4, 8]),
    ],
)
def test_when_the_reference_moves(carry: Any, every: int, expected: list[int]) -> None:
    stage = replace(STAGE, carry=carry, reference_every=every)
    due = [s for s in range(9) if is_refresh_due(stage, stage_step=s, is_first_stage=False)]
    assert due == expected
    assert not is_refresh_due(stage, stage_step=0, is_first_stage=True)


def test_a_reference_is_found_again_and_damage_is_told(toy: SimpleNamespace, tmp_path: Path) -> None:
    policy, reference, other = (toy.make_policy(seed=seed) for seed in (1, 2, 2))
    refresh_reference(reference, policy)
    for name, parameter in policy.lm.named_parameters():
        assert dict(reference.lm.named_parameters())[name].equal(parameter)
    for step in (4, 8, 10, 12):
        save_reference(tmp_path, reference, step=step, named={0, 8}, is_main=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000008.safetensors",
        "step-00000012.safetensors",
    ]
    load_reference(tmp_path, other, step=8)
    assert other.lm.lm_head.weight.equal(policy.lm.lm_head.weight)
    with pytest.raises(CheckpointError, match=r"step-00000004.*cannot be read"):
        load_reference(tmp_path, other, step=4)
    path = tmp_path / "step-00000012.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-3] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="changed since it was written"):
        load_reference(tmp_path, other, step=12)


def test_a_reference_without_weights_of_its_own_cannot_move(toy: SimpleNamespace) -> None:
    pytest.importorskip("peft")
    policy = toy.make_policy()
    require_movable(policy, [replace(STAGE, reference_every=2)])
    add_adapters(policy.lm, rank=2, seed=0)
    require_movable(policy, [STAGE])
    with pytest.raises(ConfigError, match="stage s: with LoRA the reference"):
        require_movable(policy, [replace(STAGE, reference_every=2)])


def test_true_responses_are_what_the_data_says(toy: SimpleNamespace) -> None:
    policy = toy.make_policy(seed=1)
    prompts = toy.make_prompts("text", 4)
    engine = TrueResponses(policy)
    engine.sync(policy, 7)
    rollout = engine.rollout(
        RolloutRequest(
            prompts=prompts,
            group_size=2,
            max_new_tokens=3,
            seeds=[(0, p) for p in range(4)],
            sampling=SamplingSettings(temperature=1.5),
        )
    )
    for row in range(8):
        ids = policy.response_ids(prompts[row // 2])
        assert rollout.response_ids[row][rollout.response_mask[row]].tolist() == ids[:3]
        assert bool(rollout.truncated[row]) == (len(ids) > 3)
    assert (rollout.origin.policy_version[rollout.response_mask] == 7).all()
    assert (rollout.old_logprobs[rollout.response_mask] < 0).all()


def test_the_critic_alone_learns_and_the_policy_has_no_moments(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path: Path
) -> None:
    policy = toy.make_policy()
    before = {name: p.clone() for name, p in policy.named_parameters()}
    seen: list[dict[str, bool]] = []

    def look(*_: object) -> None:
        seen.append({n: p.equal(before[n]) for n, p in policy.named_parameters()})
        moments.append([p in trainer.optimizer.optimizer.state for p in policy.trained_parameters()])

    moments: list[list[bool]] = []
    stage = replace(toy.STAGES[0], critic_warmup_steps=2, warmup_steps=0)
    trainer = toy.make_trainer(
        tmp_path, toy_store, policy=policy, stages=(stage,), on_step=look, accelerator=Accelerator(cpu=True)
    )
    trainer.train()
    for step, same in enumerate(seen):
        assert all(same[name] for name in same if name.startswith("lm.")) == (step < 2)
        assert not same["critic.value.weight"]
        assert any(moments[step]) == (step >= 2)
    assert np.isfinite([line["value/loss"] for line in lines_of(toy, tmp_path, "text")]).all()
