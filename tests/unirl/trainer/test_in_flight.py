from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from unirl.errors import CheckpointError
from unirl.rollout.native import NativeEngine
from unirl.trainer.collect import roll_out
from unirl.trainer.host_copy import HostCopy
from unirl.trainer.in_flight import InFlight, ScoredStep
from unirl.types import Direction, Rollout, SamplingSettings, Scores

CPU = torch.device("cpu")


def scored_step(toy: SimpleNamespace, direction: Direction = "text", seed: int = 0) -> ScoredStep:
    """Two rollouts of two prompts each, with a score that is missing."""
    policy = toy.make_policy(seed=seed)
    rollouts = roll_out(
        NativeEngine(policy),
        toy.make_prompts(direction),
        group_size=2,
        length=policy.max_response_length(direction, 3),
        sampling=SamplingSettings(temperature=0.7),
        seeds=[(1, prompt) for prompt in range(4)],
        micro_prompts=2,
    )
    total = np.array([0.1, np.nan, 1 / 3, -2.0])
    scores = [Scores(total=total + i, components={"likes": total}) for i in range(2)]
    return ScoredStep(rollouts=rollouts, scores=scores, cursor={"epoch": 1, "position": 4})


def open_in_flight(
    directory: Path, rank: int = 0, world_size: int = 1, others: Sequence[int] = ()
) -> InFlight:
    return InFlight(directory, rank=rank, world_size=world_size, gather=lambda steps: [*steps, *others])


def keep(directory: Path, *steps: int, toy: SimpleNamespace, whole_step: int = -1) -> None:
    in_flight = open_in_flight(directory)
    for step in steps:
        in_flight.save(step, scored_step(toy, seed=step), whole_step=whole_step)
    in_flight.finish()
    in_flight.close()


def assert_same_rollout(left: Rollout, right: Rollout) -> None:
    for name in ("input_ids", "attention_mask", "response_mask", "old_logprobs", "truncated"):
        assert getattr(left, name).equal(getattr(right, name)), name
        assert getattr(left, name).dtype == getattr(right, name).dtype
    for name in ("modality", "temperature", "guidance", "policy_version"):
        assert getattr(left.origin, name).equal(getattr(right.origin, name)), name
    assert (left.group_size, left.prompt_length) == (right.group_size, right.prompt_length)
    assert list(left.active_rows) == list(right.active_rows) and left.decode_s == right.decode_s
    for prompt, other in zip(left.prompts, right.prompts, strict=True):
        assert (prompt.key, prompt.direction, prompt.caption) == (other.key, other.direction, other.caption)
        assert np.array_equal(prompt.codes, other.codes) and np.array_equal(prompt.image, other.image)
        assert prompt.context_codes is other.context_codes is None


@pytest.mark.parametrize("direction", ["text", "image"])
def test_samples_come_back_bit_for_bit(toy: SimpleNamespace, tmp_path: Path, direction: Direction) -> None:
    saved = scored_step(toy, direction)
    in_flight = open_in_flight(tmp_path)
    assert in_flight.load(7, CPU) is None
    in_flight.save(7, saved, whole_step=-1)
    in_flight.close()
    found = open_in_flight(tmp_path).load(7, CPU)
    assert found is not None and found.cursor == saved.cursor
    for rollout, other in zip(saved.rollouts, found.rollouts, strict=True):
        assert_same_rollout(rollout, other)
    for scores, others in zip(saved.scores, found.scores, strict=True):
        assert np.array_equal(scores.total, others.total, equal_nan=True)
        assert np.array_equal(scores.components["likes"], others.components["likes"], equal_nan=True)


def test_global_generators_go_on_behind_the_reward(toy: SimpleNamespace, tmp_path: Path) -> None:
    torch.manual_seed(5)
    keep(tmp_path, 1, toy=toy)
    drawn = (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random())
    assert open_in_flight(tmp_path).load(1, CPU) is not None
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()) == drawn


def test_only_steps_that_no_whole_checkpoint_holds_are_kept(toy: SimpleNamespace, tmp_path: Path) -> None:
    keep(tmp_path, 1, 2, 3, toy=toy)
    keep(tmp_path, 4, toy=toy, whole_step=2)
    in_flight = open_in_flight(tmp_path)
    assert [step for step in range(6) if in_flight.load(step, CPU) is not None] == [3, 4]


@pytest.mark.parametrize("ending", ["json", "safetensors"])
def test_damaged_samples_are_rolled_out_again(toy: SimpleNamespace, tmp_path: Path, ending: str) -> None:
    keep(tmp_path, 1, toy=toy)
    (file,) = tmp_path.glob(f"*.{ending}")
    file.write_bytes(bytes(file.stat().st_size))
    assert open_in_flight(tmp_path).load(1, CPU) is None


def test_ranks_use_a_step_only_together(toy: SimpleNamespace, tmp_path: Path) -> None:
    """Another number of ranks, or a rank without its part: all roll out again."""
    keep(tmp_path, 1, toy=toy)
    assert open_in_flight(tmp_path, world_size=2, others=[1]).load(1, CPU) is None
    two = open_in_flight(tmp_path, world_size=2)
    two.save(2, scored_step(toy), whole_step=-1)
    two.close()
    assert open_in_flight(tmp_path, world_size=2, others=[]).load(2, CPU) is None
    assert open_in_flight(tmp_path, world_size=2, others=[2]).load(2, CPU) is not None


def test_a_full_disk_is_said_at_the_next_step(
    toy: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HostCopy, "write", full)
    in_flight = open_in_flight(tmp_path)
    in_flight.save(1, scored_step(toy), whole_step=-1)
    with pytest.raises(CheckpointError, match=r"samples of step 1 could not be written: .*No space left"):
        in_flight.save(2, scored_step(toy), whole_step=-1)
    in_flight.close()
    assert open_in_flight(tmp_path).load(1, CPU) is None
