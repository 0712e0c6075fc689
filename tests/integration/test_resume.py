"""A run that was killed or stopped, at any instant and any number of times, ends as the one that was not."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from storage import FeatureStore

Run = Callable[..., tuple[int | None, str]]

pytestmark = pytest.mark.slow


def assert_same_run(toy: SimpleNamespace, left: Path, right: Path) -> None:
    assert toy.metrics_of(left) == toy.metrics_of(right)
    assert toy.experience_of(left) == toy.experience_of(right)
    weights, others = toy.weights_of(left), toy.weights_of(right)
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        assert value.equal(others[name]), name
    states = [
        json.loads(max((run / "checkpoints").glob("step-*/state.json")).read_text())["state"]
        for run in (left, right)
    ]
    assert states[0]["stages"] == states[1]["stages"]


@pytest.mark.parametrize("touch", [3, 90, 250, 306, 311, 390, 505, 604, 614, 700, 894])
def test_killed_at_any_touch_of_a_file(
    toy_run: Run, whole_run: Path, toy: SimpleNamespace, tmp_path: Path, touch: int
) -> None:
    """While a store is made, a step is committed, a checkpoint is written, an old one is removed."""
    run = tmp_path / "run"
    code, said = toy_run(run, "--kill-at", str(touch))
    assert code == -signal.SIGKILL, said
    code, said = toy_run(run)
    assert code == 0, said
    assert_same_run(toy, run, whole_run)
    assert FeatureStore.open(run / "experience").verify().ok


def test_killed_again_and_again(toy_run: Run, whole_run: Path, toy: SimpleNamespace, tmp_path: Path) -> None:
    """Each start gets a little further; two kills come while the run is being picked up."""
    run = tmp_path / "run"
    for touch in (320, 12, 250, 40):
        code, said = toy_run(run, "--kill-at", str(touch))
        assert code == -signal.SIGKILL, said
    code, said = toy_run(run)
    assert code == 0, said
    assert_same_run(toy, run, whole_run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_polite_stop_saves_and_asks_to_be_started_again(
    start_toy_run: Callable[..., tuple[object, Path]],
    toy_run: Run,
    whole_run: Path,
    toy: SimpleNamespace,
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    run = tmp_path / "run"
    process, output = start_toy_run(run, "--pause-s", "0.5")
    while not output.exists() or "text 2" not in output.read_text():
        assert process.is_alive(), output.read_text()
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.join(timeout=60)
    assert process.exitcode == 75, output.read_text()
    assert "text 3" not in output.read_text()
    assert (run / "checkpoints" / "step-00000002").is_dir()
    code, said = toy_run(run)
    assert code == 0, said
    assert_same_run(toy, run, whole_run)


def test_a_run_can_be_moved_between_two_starts(
    toy_run: Run, whole_run: Path, toy: SimpleNamespace, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert toy_run(run, "--kill-at", "390")[0] == -signal.SIGKILL
    run.rename(tmp_path / "moved")
    code, said = toy_run(tmp_path / "moved")
    assert code == 0, said
    assert_same_run(toy, tmp_path / "moved", whole_run)
