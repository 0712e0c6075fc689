from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from unirl.errors import CheckpointError
from unirl.trainer.checkpoint import load_checkpoint, newest_checkpoint
from unirl.trainer.checkpoint_folder import remove_leftovers
from unirl.trainer.checkpoint_saver import CheckpointSaver
from unirl.trainer.host_copy import HostCopy
from unirl.trainer.rng_state import derive_rng_state, read_rng_state, restore_rng_state


def model_of(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and optimizer state that are this number throughout."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.data.fill_(value)
        optimizer.state[parameter] = {
            "step": torch.tensor(value),
            "exp_avg": torch.full_like(parameter, value),
        }
    return model, optimizer


def save(saver: CheckpointSaver, step: int, judge: float | None = None) -> None:
    model, optimizer = model_of(step)
    saver.save(step=step, model=model, optimizer=optimizer, state={"step": step}, judge=judge)


def assert_holds(path: Path | None, step: int) -> None:
    assert path is not None
    model, optimizer = model_of(-1)
    assert load_checkpoint(path, model=model, optimizer=optimizer) == {"step": step}
    for parameter in model.parameters():
        assert (parameter == step).all() and (optimizer.state[parameter]["exp_avg"] == step).all()
        assert optimizer.state[parameter]["step"] == step


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing waits until this is set."""
    release, write = threading.Event(), HostCopy.write

    def slow(copy: HostCopy, path: Path) -> object:
        release.wait(timeout=60)
        return write(copy, path)

    monkeypatch.setattr(HostCopy, "write", slow)
    yield release
    release.set()


def test_training_goes_on_while_it_is_written(tmp_path: Path, held: threading.Event) -> None:
    """What is saved is what was there at the time, though the weights change before it is on the disk."""
    saver = CheckpointSaver([tmp_path], keep=1)
    model, optimizer = model_of(1)
    saver.save(step=1, model=model, optimizer=optimizer, state={"step": 1})
    saver.wait_for_copy()
    for parameter in model.parameters():
        parameter.data.fill_(2)
        optimizer.state[parameter]["exp_avg"].fill_(2)
    saver.poll()
    assert newest_checkpoint(tmp_path) is None and saver.whole_step == -1
    held.set()
    saver.finish()
    assert_holds(newest_checkpoint(tmp_path), 1)
    assert saver.whole_step == 1
    saver.close()


def test_never_two_at_a_time(tmp_path: Path, held: threading.Event) -> None:
    saver = CheckpointSaver([tmp_path], keep=5)
    save(saver, 1)
    second = threading.Thread(target=save, args=(saver, 2))
    second.start()
    second.join(timeout=0.2)
    assert second.is_alive()
    held.set()
    second.join()
    saver.finish()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000001", "step-00000002"]
    assert_holds(tmp_path / "step-00000001", 1)
    assert_holds(tmp_path / "step-00000002", 2)
    saver.close()


def test_a_full_disk_is_said_once_and_saving_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = CheckpointSaver([tmp_path], keep=1)
    save(saver, 1)
    saver.finish()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
        save(saver, 2)
        with pytest.raises(CheckpointError, match=r"step-00000002: [\d,]+ bytes are needed and 10 are free"):
            saver.finish()
    saver.finish()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-00000001"]
    save(saver, 3)
    saver.finish()
    assert_holds(newest_checkpoint(tmp_path), 3)
    saver.close()


def test_the_one_that_the_judge_liked_best_stays(tmp_path: Path) -> None:
    saver = CheckpointSaver([tmp_path], keep=1)
    for step, judge in ((1, 0.5), (2, 0.7), (3, None), (4, 0.6), (5, None)):
        save(saver, step, judge)
    saver.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000005"]
    save(saver, 6, 0.7)
    saver.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]
    saver.close()


def test_a_local_folder_first_and_the_newest_of_both_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that fails does not keep the other from getting its checkpoint."""
    local, shared = tmp_path / "local", tmp_path / "shared"
    saver = CheckpointSaver([local, shared], keep=1)
    save(saver, 1)
    saver.finish()
    assert newest_checkpoint(local, shared) == local / "step-00000001"
    assert newest_checkpoint(shared) == shared / "step-00000001"
    write = HostCopy.write

    def fails(copy: HostCopy, path: Path) -> object:
        if local in path.parents:
            raise OSError(28, "No space left on device")
        return write(copy, path)

    monkeypatch.setattr(HostCopy, "write", fails)
    save(saver, 2)
    with pytest.raises(CheckpointError, match=r"local/step-00000002: .*No space left"):
        saver.finish()
    assert newest_checkpoint(local, shared) == shared / "step-00000002"
    assert_holds(newest_checkpoint(local, shared), 2)
    saver.close()


def ranks(directory: Path, *, timeout_s: float = 60.0) -> list[CheckpointSaver]:
    return [
        CheckpointSaver([directory], keep=1, rank=rank, world_size=2, timeout_s=timeout_s) for rank in (0, 1)
    ]


def test_it_is_whole_when_every_rank_has_written(tmp_path: Path) -> None:
    first, second = ranks(tmp_path)
    save(first, 1)
    first.wait_for_copy()
    assert newest_checkpoint(tmp_path) is None
    save(second, 1)
    first.finish()
    second.finish()
    assert_holds(newest_checkpoint(tmp_path), 1)
    assert sorted(json.loads((tmp_path / "step-00000001" / "state.json").read_text())["files"]) == [
        "optimizer.safetensors",
        "policy.safetensors",
        "rank-00000.json",
        "rank-00001.json",
    ]
    first.close()
    second.close()


def test_a_rank_that_cannot_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ranks(tmp_path)
    fsync = os.fsync

    def full(handle: int) -> None:
        if "rank-00001" in str(Path(f"/proc/self/fd/{handle}").readlink()):
            raise OSError(28, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    save(first, 1)
    save(second, 1)
    with pytest.raises(CheckpointError, match=r"rank 1 could not write: .*No space left"):
        first.finish()
    with pytest.raises(CheckpointError, match="No space left"):
        second.finish()
    assert newest_checkpoint(tmp_path) is None
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []
    first.close()
    second.close()


def test_the_others_do_not_wait_for_what_the_first_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ranks(tmp_path)
    monkeypatch.setattr("unirl.trainer.checkpoint_saver.rotate", _fail)
    save(first, 1)
    save(second, 1)
    with pytest.raises(CheckpointError, match="Input/output error"):
        first.finish()
    second.finish()
    monkeypatch.undo()
    monkeypatch.setattr(HostCopy, "write", _fail)
    save(second, 2)
    save(first, 2)
    with pytest.raises(CheckpointError, match="Input/output error"):
        first.finish()
    with pytest.raises(CheckpointError, match=r"the first rank gave it up|No such file"):
        second.finish()
    first.close()
    second.close()


def _fail(*_: object, **__: object) -> None:
    raise OSError(5, "Input/output error")


def test_closing_does_not_wait_for_a_rank_that_is_gone(tmp_path: Path) -> None:
    first, second = ranks(tmp_path)
    save(first, 1)
    first.wait_for_copy()
    first.close()
    second.close()
    assert newest_checkpoint(tmp_path) is None


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    """All types, an empty tensor and a scalar; what is written is what is said of it."""
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "wide": torch.randn(2, 2, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(7),
        "turned": torch.arange(6, dtype=torch.int16).reshape(2, 3).T,
    }
    copy = HostCopy()
    for _ in range(2):
        copy.take(tensors, metadata={"note": "x"})
        wanted = copy.write(tmp_path / "file.safetensors")
    found = load_file(tmp_path / "file.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].equal(tensor) and found[name].dtype == tensor.dtype
    assert wanted["bytes"] == copy.num_bytes == (tmp_path / "file.safetensors").stat().st_size


def drawn() -> tuple[list[float], list[float], list[float]]:
    return torch.rand(5).tolist(), np.random.rand(5).tolist(), [random.random() for _ in range(5)]


def test_generators_go_on_where_they_were() -> None:
    np.random.standard_normal()
    random.gauss(0, 1)
    state = json.loads(json.dumps(read_rng_state()))
    numbers = drawn()
    drawn()
    restore_rng_state(state)
    assert drawn() == numbers


def test_derived_generators_differ_by_rank_and_repeat() -> None:
    derive_rng_state((3, 40, 0))
    first = drawn()
    derive_rng_state((3, 40, 1))
    assert drawn() != first
    derive_rng_state((3, 40, 0))
    assert drawn() == first
