"""Field cases of checkpoints, by their rows in the case list."""

from __future__ import annotations

import json
import logging
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from unirl.errors import CheckpointError
from unirl.rollout.engine import sample_uniforms
from unirl.trainer.checkpoint import load_checkpoint, newest_checkpoint
from unirl.trainer.checkpoint_folder import remove_leftovers
from unirl.trainer.checkpoint_saver import CheckpointSaver, save_checkpoint
from unirl.trainer.host_copy import HostCopy

TOY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "toy.py")))

SAVE_AND_DIE = """
import os, runpy, signal, sys
from pathlib import Path
cases = runpy.run_path(sys.argv[1])
directory = Path(sys.argv[2])
for touch in range(int(sys.argv[3])):
    child = os.fork()
    if child == 0:
        left = touch
        def hook(event, arguments):
            global left
            if event in ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "shutil.rmtree") and (
                str(directory) in str(arguments[0])
            ):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        cases["save"](directory, 3, keep=2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(touch, os.WIFSIGNALED(status), cases["what_is_resumed"](directory), flush=True)
    cases["save"](directory, 2, keep=2)
"""


def policy_at(step: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A policy whose weights say which step it is of."""
    policy = TOY.make_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for parameter in policy.parameters():
        parameter.data.fill_(step)
        state = {"step": torch.tensor(float(step)), "exp_avg": torch.full_like(parameter, step)}
        optimizer.state[parameter] = state
    return policy, optimizer


def save(directory: Path, *steps: int, keep: int = 10) -> None:
    for step in steps:
        policy, optimizer = policy_at(step)
        save_checkpoint(
            directory, step=step, model=policy, optimizer=optimizer, state={"step": step}, keep=keep
        )


def what_is_resumed(directory: Path) -> int:
    """The step of the checkpoint that a resume takes, once weights, optimizer and state agree on it."""
    path = newest_checkpoint(directory)
    assert path is not None
    policy, optimizer = policy_at(0)
    step = load_checkpoint(path, model=policy, optimizer=optimizer)["step"]
    for parameter in policy.parameters():
        assert (parameter == step).all()
        assert float(optimizer.state[parameter]["step"]) == step
        assert (optimizer.state[parameter]["exp_avg"] == step).all()
    assert path.name == f"step-{step:08d}"
    return int(step)


@pytest.mark.slow
def test_ckpt_01_killed_at_every_step_of_a_save(tmp_path: Path) -> None:
    """SIGKILL at each of 20 touches of the file system: the old or the new checkpoint, never half of one."""
    directory = tmp_path / "checkpoints"
    save(directory, 1, 2)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", SAVE_AND_DIE, __file__, str(directory), "20"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 20
    steps = [int(step) for _, _, step in lines]
    assert steps == sorted(steps) and set(steps) == {2, 3}
    assert sum(killed == "True" for _, killed, _ in lines) >= 12


@pytest.mark.parametrize("name", ["policy.safetensors", "optimizer.safetensors", "state.json"])
def test_ckpt_01_a_power_cut_leaves_zeroes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    save(tmp_path, 1, 2)
    file = tmp_path / "step-00000002" / name
    file.write_bytes(bytes(file.stat().st_size))
    with caplog.at_level(logging.WARNING):
        assert what_is_resumed(tmp_path) == 1
    assert name in caplog.text and "step-00000002" in caplog.text


def test_ckpt_01_a_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    """What a quota does: the file cannot grow. The checkpoint before stays, nothing half is left."""
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step-00000002: .*File too large"):
            save(tmp_path, 2, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert what_is_resumed(tmp_path) == 1
    save(tmp_path, 2, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_ckpt_01_the_previous_one_goes_only_when_the_new_one_is_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk while saving, with keep=1: the only checkpoint stays."""
    save(tmp_path, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HostCopy, "write", full)
    with pytest.raises(CheckpointError, match=r"step-00000002: .*No space left"):
        save(tmp_path, 2, keep=1)
    monkeypatch.undo()
    assert what_is_resumed(tmp_path) == 1
    save(tmp_path, 2, keep=1)
    assert what_is_resumed(tmp_path) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("instant", ["before the new one has the name", "before the old one is gone"])
def test_ckpt_01_a_step_saved_a_second_time_is_never_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant: str
) -> None:
    """keep=1, stopped in an evaluation and saved there, saved again after it, and killed in between."""
    save(tmp_path, 2, keep=1)

    def killed(path: Path, *_: object, **__: object) -> None:
        if path.suffix in (".partial", ".replaced"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if "new" in instant:
            rename = Path.rename
            patch.setattr(
                Path,
                "rename",
                lambda path, to: killed(path) if to.name == "step-00000002" else rename(path, to),
            )
        else:
            patch.setattr(shutil, "rmtree", killed)
        save(tmp_path, 2, keep=1)
    remove_leftovers(tmp_path)
    assert what_is_resumed(tmp_path) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def _lacks_a_file(path: Path) -> None:
    (path / "optimizer.safetensors").unlink()


def _has_an_empty_file(path: Path) -> None:
    (path / "policy.safetensors").write_bytes(b"")


def _has_another_hash(path: Path) -> None:
    record = json.loads((path / "state.json").read_text())
    record["files"]["policy.safetensors"]["xxh3_128"] = "0" * 32
    (path / "state.json").write_text(json.dumps(record))


def _lost_its_marker(path: Path) -> None:
    (path / "state.json").unlink()


@pytest.mark.parametrize("damage", [_lacks_a_file, _has_an_empty_file, _has_another_hash, _lost_its_marker])
def test_ckpt_02_the_newest_of_three_is_incomplete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    save(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-00000003")
    with caplog.at_level(logging.WARNING):
        assert what_is_resumed(tmp_path) == 2
    assert len(caplog.records) == 1 and "step-00000003" in caplog.text


def test_ckpt_04_no_generator_state_is_needed() -> None:
    """Every rank's numbers are a function of seed, step, prompt and sample: equal after any restart."""
    whole = [sample_uniforms((3, 7, prompt), 2, 5) for prompt in range(6)]
    for ranks in (1, 2, 3):
        share = 6 // ranks
        torch.manual_seed(ranks)
        parts = [
            sample_uniforms((3, 7, rank * share + i), 2, 5) for rank in range(ranks) for i in range(share)
        ]
        assert all((part == other).all() for part, other in zip(parts, whole, strict=True))


def run_ranks(directory: Path, mode: str, world_size: int) -> tuple[dict[int, list[float]], str]:
    """Save or load on so many ranks; returns each rank's next numbers and what was logged."""
    root = Path(__file__).parents[2]
    program = [
        str(root / "tests/integration/rank_checkpoints.py"),
        str(root / "tests/toy.py"),
        str(directory),
        mode,
    ]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    done = subprocess.run(
        [sys.executable, *(launcher if world_size > 1 else []), *program],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["rank"]: line["numbers"] for line in lines}, done.stderr


@pytest.mark.slow
def test_ckpt_04_two_sharded_ranks_save_and_two_three_or_one_go_on(tmp_path: Path) -> None:
    """Weights and moments are the same on any number of ranks; generators go on, or are derived."""
    numbers, _ = run_ranks(tmp_path, "save", 2)
    assert numbers[0] != numbers[1]
    record = json.loads((tmp_path / "step-00000003" / "state.json").read_text())
    files = record["files"]
    # Each rank writes its part of the layer that is frozen, under the checksum of what it wrote.
    assert len(record["frozen"]) == 2
    for kind in ("policy", "optimizer"):
        assert [name for name in files if name.startswith(kind)] == [
            f"{kind}.0000{rank}-of-00002.safetensors" for rank in (0, 1)
        ]
    same, said = run_ranks(tmp_path, "load", 2)
    assert same == numbers and "resuming from" in said and "seeded anew" not in said
    for world_size in (1, 3):
        other, said = run_ranks(tmp_path, "load", world_size)
        assert len({tuple(drawn) for drawn in other.values()}) == world_size
        assert f"saved on 2 ranks and resumed on {world_size}" in said and "seeded anew" in said


@pytest.mark.parametrize("row", ["ckpt_04_called_on_the_main_rank_alone", "ckpt_07_rank_1_killed_in_a_save"])
def test_ckpt_04_and_07_a_part_that_never_comes_is_an_error_and_no_hang(tmp_path: Path, row: str) -> None:
    """`save` under `if main`; rank 1 killed between its tensors and its last file."""
    save(tmp_path, 1)
    saver = CheckpointSaver([tmp_path], keep=1, rank=0, world_size=2, timeout_s=0.3)
    policy, optimizer = policy_at(2)
    if "killed" in row:
        part = tmp_path / ".step-00000002.1.partial" / "policy.00001-of-00002.safetensors"
        part.parent.mkdir()
        part.write_bytes(b"half of it")
    saver.save(step=2, model=policy, optimizer=optimizer, state={"step": 2})
    with pytest.raises(CheckpointError, match=r"rank 1 wrote no part within 0 s; all ranks have to save"):
        saver.finish()
    saver.close()
    assert what_is_resumed(tmp_path) == 1


def test_ckpt_07_rotation_never_takes_the_best(tmp_path: Path) -> None:
    """keep=1 on a run that was moved, with a resumed last save."""
    policy, optimizer = policy_at(1)
    save_checkpoint(
        tmp_path / "a", step=1, model=policy, optimizer=optimizer, state={"step": 1}, keep=1, judge=0.9
    )
    shutil.move(tmp_path / "a", tmp_path / "b")
    save(tmp_path / "b", 2, 3, keep=1)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["step-00000001", "step-00000003"]
    assert what_is_resumed(tmp_path / "b") == 3


def test_ckpt_07_without_a_judge_rotation_never_takes_the_one_of_most_reward(tmp_path: Path) -> None:
    """A reward counts only where no judge could tell of any of them."""
    policy, optimizer = policy_at(1)

    def saved(folder: str, *judges: float | None) -> list[str]:
        for step, (judge, reward) in enumerate(zip(judges, (0.3, 0.9, 0.5, None), strict=True), start=1):
            save_checkpoint(
                tmp_path / folder,
                step=step,
                model=policy,
                optimizer=optimizer,
                state={"step": step},
                keep=1,
                judge=judge,
                reward=reward,
            )
        return sorted(path.name for path in (tmp_path / folder).iterdir())

    assert saved("unjudged", None, None, None, None) == ["step-00000002", "step-00000004"]
    assert saved("judged", 0.7, 0.1, None, None) == ["step-00000001", "step-00000004"]


def test_ckpt_07_rotation_never_takes_the_one_that_was_resumed(tmp_path: Path) -> None:
    """keep=1, a moved run, the newer one damaged: what was loaded stays until the next is whole."""
    save(tmp_path / "a", 10, 20)
    (tmp_path / "a" / "step-00000020" / "state.json").write_text("")
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert what_is_resumed(tmp_path / "b") == 10
    save(tmp_path / "b", 15, keep=1)
    assert what_is_resumed(tmp_path / "b") == 15
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["step-00000015"]


def test_ckpt_07_no_path_is_written_into_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert str(tmp_path) not in (tmp_path / "step-00000001" / "state.json").read_text()
