"""What nothing trains is written once for all checkpoints, and found again by its content."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from unirl.errors import CheckpointError
from unirl.policies.policy import Policy
from unirl.trainer.checkpoint import load_checkpoint, newest_checkpoint
from unirl.trainer.checkpoint_saver import CheckpointSaver, save_checkpoint

EMBEDDING = "lm.model.embed_tokens.weight"


def make(toy: SimpleNamespace, seed: int = 0) -> tuple[Policy, torch.optim.Optimizer]:
    """A policy whose embedding is frozen."""
    policy: Policy = toy.make_policy(seed=seed)
    policy.lm.get_input_embeddings().requires_grad_(False)
    return policy, torch.optim.AdamW(policy.trained_parameters(), lr=1e-2)


def files_of(directory: Path) -> list[Path]:
    return sorted((directory / "frozen").iterdir())


def test_one_file_for_all_checkpoints_and_back_bit_for_bit(toy: SimpleNamespace, tmp_path: Path) -> None:
    policy, optimizer = make(toy)
    saver = CheckpointSaver([tmp_path / "fast", tmp_path / "run"], keep=5)
    for step in (1, 2):
        with torch.no_grad():
            policy.lm.lm_head.weight.add_(step)
        saver.save(step=step, model=policy, optimizer=optimizer, state={"step": step})
        saver.finish()
        if step == 1:
            times = [file.stat().st_mtime_ns for d in ("fast", "run") for file in files_of(tmp_path / d)]
    saver.close()
    assert [f.stat().st_mtime_ns for d in ("fast", "run") for f in files_of(tmp_path / d)] == times
    for directory in (tmp_path / "fast", tmp_path / "run"):
        (frozen,) = files_of(directory)
        assert load_file(frozen).keys() == {EMBEDDING}
        for step in (1, 2):
            path = directory / f"step-{step:08d}"
            assert EMBEDDING not in load_file(path / "policy.safetensors")
            assert list(json.loads((path / "state.json").read_text())["frozen"]) == [frozen.name]
        other, other_optimizer = make(toy, seed=7)
        assert load_checkpoint(path, model=other, optimizer=other_optimizer) == {"step": 2}
        for name, value in policy.state_dict().items():
            assert value.equal(other.state_dict()[name]), name


def test_another_start_writes_no_second_file_and_a_change_does(toy: SimpleNamespace, tmp_path: Path) -> None:
    policy, optimizer = make(toy)
    save = {"model": policy, "optimizer": optimizer, "state": {}, "keep": 5}
    save_checkpoint(tmp_path, step=1, **save)
    (first,) = files_of(tmp_path)
    written = first.stat().st_mtime_ns
    save_checkpoint(tmp_path, step=2, **save)
    assert files_of(tmp_path) == [first] and first.stat().st_mtime_ns == written
    with torch.no_grad():
        policy.lm.get_input_embeddings().weight.zero_()
    save_checkpoint(tmp_path, step=3, **save)
    assert len(files_of(tmp_path)) == 2
    for step, is_zero in ((2, False), (3, True)):
        other, other_optimizer = make(toy, seed=7)
        load_checkpoint(tmp_path / f"step-{step:08d}", model=other, optimizer=other_optimizer)
        assert bool(other.lm.get_input_embeddings().weight.any()) is not is_zero


def test_a_file_that_is_lost_is_written_again(toy: SimpleNamespace, tmp_path: Path) -> None:
    policy, optimizer = make(toy)
    saver = CheckpointSaver([tmp_path], keep=5)
    for step in (1, 2):
        shutil.rmtree(tmp_path / "frozen", ignore_errors=True)
        saver.save(step=step, model=policy, optimizer=optimizer, state={})
        saver.finish()
    saver.close()
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000002"


def test_damage_is_told(toy: SimpleNamespace, tmp_path: Path) -> None:
    policy, optimizer = make(toy)
    save_checkpoint(tmp_path, step=1, model=policy, optimizer=optimizer, state={}, keep=1)
    (frozen,) = files_of(tmp_path)
    content = bytearray(frozen.read_bytes())
    content[-3] ^= 1
    frozen.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"frozen/{frozen.name}: missing, cut short or changed"):
        load_checkpoint(tmp_path / "step-00000001", model=policy, optimizer=optimizer)


def test_what_no_checkpoint_names_any_more_goes(toy: SimpleNamespace, tmp_path: Path) -> None:
    """As the parts of another number of ranks, once the checkpoints that were saved on it are gone."""
    policy, optimizer = make(toy)
    save = {"model": policy, "optimizer": optimizer, "state": {}, "keep": 1}
    save_checkpoint(tmp_path, step=1, **save)
    (first,) = files_of(tmp_path)
    with torch.no_grad():
        policy.lm.get_input_embeddings().weight.add_(1)
    save_checkpoint(tmp_path, step=2, **save)
    assert first in files_of(tmp_path), "the checkpoint before still names it while this one is put in place"
    save_checkpoint(tmp_path, step=3, **save)
    (second,) = files_of(tmp_path)
    assert second != first
    assert load_checkpoint(tmp_path / "step-00000003", model=policy, optimizer=optimizer) == {}
