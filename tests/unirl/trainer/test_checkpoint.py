from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from unirl.errors import CheckpointError
from unirl.policies.token_lm import TokenLM
from unirl.trainer.checkpoint import digest, load_checkpoint, newest_checkpoint
from unirl.trainer.checkpoint_saver import save_checkpoint

STATE = {"position": {"step": 3, "wall_s": 0.1}, "kl": [{"value": 0.02}], "sources": [{"epoch": 1}]}


def make(toy: SimpleNamespace, seed: int = 0, updates: int = 3) -> tuple[TokenLM, torch.optim.AdamW]:
    """A policy and its optimizer after a few steps on random gradients."""
    policy = toy.make_policy(seed=seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    train(policy, optimizer, updates)
    return policy, optimizer


def train(policy: nn.Module, optimizer: torch.optim.Optimizer, updates: int) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(updates):
        for parameter in policy.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def weights(policy: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in policy.state_dict().items()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.equal(right[name]), name


def save(directory: Path, toy: SimpleNamespace, *steps: int, keep: int = 10) -> list[Path]:
    """One checkpoint a step; the policy of step n was trained for n updates."""
    paths = []
    for step in steps:
        policy, optimizer = make(toy, updates=step)
        state = {**STATE, "position": {"step": step}}
        paths.append(
            save_checkpoint(directory, step=step, model=policy, optimizer=optimizer, state=state, keep=keep)
        )
    return paths


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_round_trip_bit_for_bit(toy: SimpleNamespace, tmp_path: Path) -> None:
    """The same weights, and the same weights again after three more steps."""
    policy, optimizer = make(toy)
    path = save_checkpoint(tmp_path, step=3, model=policy, optimizer=optimizer, state=STATE, keep=1)
    assert path == tmp_path / "step-00000003"
    assert names(path) == ["optimizer.safetensors", "policy.safetensors", "rank-00000.json", "state.json"]
    other, other_optimizer = make(toy, seed=5, updates=1)
    assert load_checkpoint(path, model=other, optimizer=other_optimizer) == STATE
    assert_same(weights(other), weights(policy))
    train(policy, optimizer, 3)
    train(other, other_optimizer, 3)
    assert_same(weights(other), weights(policy))


def test_a_run_without_updates_has_no_optimizer_state_yet(toy: SimpleNamespace, tmp_path: Path) -> None:
    policy, optimizer = make(toy, updates=0)
    path = save_checkpoint(tmp_path, step=0, model=policy, optimizer=optimizer, state={}, keep=1)
    other, other_optimizer = make(toy, seed=1, updates=0)
    assert load_checkpoint(path, model=other, optimizer=other_optimizer) == {}
    assert not other_optimizer.state


def test_shared_embeddings_are_saved_once_and_stay_shared(toy: SimpleNamespace, tmp_path: Path) -> None:
    vocabulary = toy.make_vocabulary()
    config = Qwen2Config(
        vocab_size=vocabulary.size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    policy, other = (TokenLM(Qwen2ForCausalLM(config), vocabulary) for _ in range(2))
    optimizer, other_optimizer = (torch.optim.AdamW(p.parameters(), lr=1e-2) for p in (policy, other))
    train(policy, optimizer, 2)
    path = save_checkpoint(tmp_path, step=2, model=policy, optimizer=optimizer, state={}, keep=1)
    load_checkpoint(path, model=other, optimizer=other_optimizer)
    assert_same(weights(other), weights(policy))
    train(policy, optimizer, 2)
    train(other, other_optimizer, 2)
    assert_same(weights(other), weights(policy))
    assert other.lm.lm_head.weight.data_ptr() == other.lm.model.embed_tokens.weight.data_ptr()


def test_the_newest_keep_stay(toy: SimpleNamespace, tmp_path: Path) -> None:
    save(tmp_path, toy, 1, 2, 3, 4, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000004"


def test_steps_are_ordered_as_numbers(toy: SimpleNamespace, tmp_path: Path) -> None:
    save(tmp_path, toy, 9, 10)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000010"


@pytest.mark.parametrize("exists", [True, False])
def test_a_run_that_has_not_saved_yet(tmp_path: Path, exists: bool) -> None:
    directory = tmp_path / "checkpoints"
    if exists:
        directory.mkdir()
    assert newest_checkpoint(directory) is None


def _missing(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _changed(path: Path) -> None:
    """One bit in the middle; in state.json one digit, so that it stays JSON."""
    data = bytearray(path.read_bytes())
    place = data.index(b'"step": 3') + 8 if path.name == "state.json" else len(data) // 2
    data[place] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [_missing, _empty, _zeroed, _cut, _changed])
@pytest.mark.parametrize("file", ["policy.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_passed_over_loudly(
    toy: SimpleNamespace,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    file: str,
) -> None:
    previous, newest = save(tmp_path, toy, 2, 3)
    damage(newest / file)
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == previous
    (record,) = caplog.records
    assert str(newest) in record.getMessage() and file in record.getMessage()
    assert "the checkpoint before it is used" in record.getMessage()
    policy, optimizer = make(toy, seed=1, updates=0)
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        load_checkpoint(newest, model=policy, optimizer=optimizer)
    load_checkpoint(previous, model=policy, optimizer=optimizer)
    assert_same(weights(policy), weights(make(toy, updates=2)[0]))


def test_several_damaged_ones_are_passed_over(toy: SimpleNamespace, tmp_path: Path) -> None:
    oldest, *others = save(tmp_path, toy, 1, 2, 3)
    _zeroed(others[0] / "policy.safetensors")
    shutil.rmtree(others[1])
    others[1].mkdir()
    assert newest_checkpoint(tmp_path) == oldest


def test_a_run_is_never_started_over_what_is_left_of_it(toy: SimpleNamespace, tmp_path: Path) -> None:
    for path in save(tmp_path, toy, 1, 2):
        _cut(path / "state.json")
    with pytest.raises(
        CheckpointError, match=r"none of its 2 checkpoints is whole; .*move the run's folder away"
    ):
        newest_checkpoint(tmp_path)


def test_a_checkpoint_of_the_format_before_is_read(toy: SimpleNamespace, tmp_path: Path) -> None:
    """It knew neither rewards nor frozen parameters."""
    (path,) = save(tmp_path, toy, 1)
    record = json.loads((path / "state.json").read_text())
    for name in ("reward", "frozen", "xxh3_128"):
        del record[name]
    record["format"] = 2
    (path / "state.json").write_text(json.dumps({**record, "xxh3_128": digest(record)}))
    policy, optimizer = make(toy, seed=4, updates=0)
    assert newest_checkpoint(tmp_path) == path
    load_checkpoint(path, model=policy, optimizer=optimizer)
    assert_same(weights(policy), weights(make(toy, updates=1)[0]))
    save(tmp_path, toy, 2, keep=1)
    assert names(tmp_path) == ["step-00000002"]


def test_another_format_is_no_damage(toy: SimpleNamespace, tmp_path: Path) -> None:
    """A newer version wrote it: going back to an older checkpoint would lose the newer one's work."""
    _, newest = save(tmp_path, toy, 1, 2)
    record = json.loads((newest / "state.json").read_text())
    (newest / "state.json").write_text(json.dumps({**record, "format": 4}))
    with pytest.raises(CheckpointError, match=r"step-00000002: format 4, this version reads formats 2 and 3"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [1, 2])
def test_going_back_behind_a_damaged_one_loses_nothing(
    toy: SimpleNamespace, tmp_path: Path, keep: int
) -> None:
    """The damaged one has the highest number; it must not push out what is written after the fallback."""
    save(tmp_path, toy, 10, 20)
    _zeroed(tmp_path / "step-00000020" / "policy.safetensors")
    save(tmp_path, toy, 15, keep=keep)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000015"
    assert names(tmp_path) == ["step-00000010", "step-00000015"][-keep:]
    save(tmp_path, toy, 20, keep=keep)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000020"


def test_leftovers_of_a_killed_save_are_no_checkpoints_and_go_with_the_next(
    toy: SimpleNamespace, tmp_path: Path
) -> None:
    (path,) = save(tmp_path, toy, 1)
    for step in (2, 3):
        leftover = tmp_path / f".step-{step:08d}.partial"
        shutil.copytree(path, leftover)
        (leftover / "state.json").unlink()
    assert newest_checkpoint(tmp_path) == path
    save(tmp_path, toy, 2, keep=2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_other_files_in_the_folder_are_left_alone(toy: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "step-notes").mkdir(parents=True)
    (tmp_path / "best.txt").write_text("step 3")
    save(tmp_path, toy, 1, 2, keep=1)
    assert names(tmp_path) == ["best.txt", "step-00000002", "step-notes"]


def test_a_checkpoint_of_another_model_is_refused(toy: SimpleNamespace, tmp_path: Path) -> None:
    (path,) = save(tmp_path, toy, 1)
    policy = toy.make_policy(width=64)
    with pytest.raises(CheckpointError, match=r"step-00000001: does not fit this policy"):
        load_checkpoint(path, model=policy, optimizer=torch.optim.AdamW(policy.parameters()))


def test_the_folder_can_be_moved(toy: SimpleNamespace, tmp_path: Path) -> None:
    (path,) = save(tmp_path / "before", toy, 2)
    (tmp_path / "before").rename(tmp_path / "after")
    policy, optimizer = make(toy, seed=1, updates=0)
    moved = newest_checkpoint(tmp_path / "after")
    assert moved == tmp_path / "after" / path.name
    assert load_checkpoint(moved, model=policy, optimizer=optimizer)["position"] == {"step": 2}
