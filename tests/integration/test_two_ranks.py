"""Two CPU processes over gloo do what one process does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from storage import FeatureStore

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = (
    *("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
)

pytestmark = pytest.mark.slow


def assert_close_run(toy: SimpleNamespace, left: Path, right: Path) -> None:
    for line, other in zip(toy.metrics_of(left), toy.metrics_of(right), strict=True):
        assert line.keys() == other.keys()
        for name, value in line.items():
            assert value == pytest.approx(other[name], abs=1e-5), (line["step"], name)
    rows, others = toy.experience_of(left), toy.experience_of(right)
    assert rows.keys() == others.keys()
    for key, row in rows.items():
        for name, value in row.items():
            assert value == pytest.approx(others[key][name], abs=1e-5), (key, name)
    weights, expected = toy.weights_of(left), toy.weights_of(right)
    for name, value in weights.items():
        if name.startswith("policy/"):
            torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("launcher", "sharding"),
    [(TORCHRUN, "none"), (ACCELERATE, "none"), (TORCHRUN, "fsdp2")],
    ids=["torchrun", "accelerate", "fsdp2"],
)
def test_two_ranks_give_the_losses_and_rows_of_one(
    launch_toy_run: Launch,
    whole_run: Path,
    toy: SimpleNamespace,
    tmp_path: Path,
    launcher: tuple[str, ...],
    sharding: str,
) -> None:
    done = launch_toy_run(launcher, tmp_path / "run", "--set", f"distribution.sharding={sharding}")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert_close_run(toy, tmp_path / "run", whole_run)


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_stages_that_do_many_things_do_them_alike_on_two_ranks(
    toy_run: Callable[..., tuple[int | None, str]],
    launch_toy_run: Launch,
    toy: SimpleNamespace,
    tmp_path: Path,
    sharding: str,
) -> None:
    """Drawn again, learnt from again, both directions, prompts at rest, rows packed under a budget."""
    code, said = toy_run(tmp_path / "one", "--many-things")
    assert code == 0, said
    options = ("--many-things", "--set", f"distribution.sharding={sharding}")
    done = launch_toy_run(TORCHRUN, tmp_path / "two", *options)
    assert done.returncode == 0, done.stderr
    assert_close_run(toy, tmp_path / "two", tmp_path / "one")


def test_a_run_goes_on_with_another_number_of_ranks_that_share_the_model(
    toy_run: Callable[..., tuple[int | None, str]],
    launch_toy_run: Launch,
    whole_run: Path,
    toy: SimpleNamespace,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    assert toy_run(run, "--kill-at", "390")[0] != 0
    before = len(toy.metrics_of(run))
    assert 2 < before < 11
    done = launch_toy_run(TORCHRUN, run, "--set", "distribution.sharding=fsdp2")
    assert done.returncode == 0, done.stderr
    assert_close_run(toy, run, whole_run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_two_ranks_that_are_stopped_or_killed_go_on(
    toy_store: FeatureStore,
    importable: None,
    whole_run: Path,
    toy: SimpleNamespace,
    tmp_path: Path,
    number: int,
) -> None:
    """Both save what belongs together and end with 75, or both are killed; then both go on."""
    program = [str(Path(__file__).parent / "toy_run.py"), str(tmp_path / "run"), str(toy_store.path)]
    command = [sys.executable, "-m", "recipes.launch.ranks", "2", sys.executable, *program]
    with subprocess.Popen(
        [*command, "--pause-s", "0.5"], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as ranks:
        assert ranks.stdout is not None
        said = iter(ranks.stdout)
        assert any("text 2" in line for line in said)
        os.killpg(ranks.pid, number) if number == signal.SIGKILL else ranks.send_signal(number)
        assert ranks.wait(timeout=120) == (75 if number == signal.SIGTERM else -signal.SIGKILL)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stderr or number == signal.SIGKILL
    assert_close_run(toy, tmp_path / "run", whole_run)


def test_a_wrong_setting_ends_all_ranks_soon_and_is_said(launch_toy_run: Launch, tmp_path: Path) -> None:
    started = time.monotonic()
    done = launch_toy_run(TORCHRUN, tmp_path / "run", "--prompts-per-step", "6")
    assert done.returncode != 0
    assert "prompts_per_step 6 is not a multiple of 2 ranks x micro_prompts 2 = 4" in done.stderr
    assert time.monotonic() - started < 300


@pytest.mark.parametrize(("rank", "sharding"), [(0, "none"), (1, "fsdp2")])
def test_fsdp_09_the_first_error_of_one_rank_ends_both(
    launch_toy_run: Launch, tmp_path: Path, rank: int, sharding: str
) -> None:
    """Both ranks say the cause, with the rank that failed and the samples that it had."""
    options = ("--fail-on-rank", str(rank), "--set", f"distribution.sharding={sharding}")
    done = launch_toy_run(TORCHRUN, tmp_path / "run", *options)
    assert done.returncode != 0
    first = rf"rank {rank} failed first, stage text, step 2, prompts toy/\d\d, toy/\d\d: "
    cause = r"RuntimeError: the reward broke on sample toy/07(; rank . ended because of it)?"
    found = re.findall(first + cause, done.stderr)
    assert "" in found and f"; rank {1 - rank} ended because of it" in found, done.stderr
