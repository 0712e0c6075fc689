"""How soon a run ends when it is asked to, and whether stopped and killed runs end as one that was not.

python -m tools.bench.preemption [--signals 20] [--ranks 1] [--quick]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import unirl  # noqa: F401  (declares torchvision's operators before transformers is imported)
from tests.toy import experience_of, metrics_of, weights_of
from tools.bench.results import ROOT, Row, write_results
from unirl.trainer.checkpoint import newest_checkpoint, step_of
from unirl.trainer.preemption import REQUEUE_EXIT_CODE

P95_S = 5.0
LOOK_EVERY_S = 0.02
START_S = 1200.0
QUICK = ("tokenizer.steps=20", "sft.steps=20", "reward.steps=20", "text.steps=4", "image.steps=4")


@dataclass(slots=True, kw_only=True)
class Seen:
    """What happened after each signal."""

    seconds: list[float] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    steps_redone: list[int] = field(default_factory=list)
    ends_alike: bool = False


def main() -> None:
    """Train once in peace, once stopped and once killed at random instants; write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--signals", type=int, default=20, help="of each kind")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="3 signals of each kind, fewer steps")
    options = parser.parse_args()
    signals = 3 if options.quick else options.signals
    command = recipe_command(options.ranks, QUICK if options.quick else ())
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        prepare(here / "base", command)
        shutil.copytree(here / "base", here / "whole")
        trained_s = train(here / "whole", command)
        stopped = interrupt(here, signal.SIGTERM, signals, trained_s, command)
        killed = interrupt(here, signal.SIGKILL, signals, trained_s, command)
    ranks = "one process" if options.ranks == 1 else f"{options.ranks} ranks"
    path = write_results(
        "preemption" if options.ranks == 1 else f"preemption_{options.ranks}_ranks",
        rows(stopped, killed),
        notes=[
            f"The shapes recipe, {ranks}, {trained_s:.0f} s of training in peace. Signals come "
            "at random instants from the opening of the log on. Time is from the signal to the end of the "
            "process. Alike: metrics but for times, experience, weights and optimizer, bit for bit."
        ],
    )
    print(path.with_suffix(".md").read_text())


def prepare(run: Path, command: Sequence[str]) -> None:
    """Make data and models once, and stop before the first step."""
    process = start(run, command)
    _wait_until_open(run, process, None)
    process.send_signal(signal.SIGTERM)
    process.wait()


def train(run: Path, command: Sequence[str]) -> float:
    """Train to the end; returns the seconds from the opening of the log on."""
    before = _log_file(run)
    process = start(run, command)
    _wait_until_open(run, process, before)
    started = time.perf_counter()
    if process.wait():
        raise SystemExit(f"training in peace ended with {process.returncode}")
    return time.perf_counter() - started


def interrupt(
    here: Path, number: signal.Signals, wanted: int, trained_s: float, command: Sequence[str]
) -> Seen:
    """Send a signal again and again, in as many runs as it takes; compare the ends with the whole run's."""
    seen, instants, alike = Seen(), random.Random(number), []
    while len(seen.seconds) < wanted:
        run = here / f"run-{number.name}-{len(seen.seconds)}"
        shutil.copytree(here / "base", run)
        code = -1
        while code != 0:
            before = _log_file(run)
            process = start(run, command)
            _wait_until_open(run, process, before)
            if len(seen.seconds) < wanted:
                pause_s = instants.uniform(0.0, 2.0 * trained_s / (wanted + 1))
                code = _interrupt_one(process, run, number, pause_s, seen)
            else:
                code = process.wait()
        alike.append(_is_alike(run, here / "whole"))
        shutil.rmtree(run)
    seen.ends_alike = all(alike)
    return seen


def _interrupt_one(
    process: subprocess.Popen[bytes], run: Path, number: signal.Signals, pause_s: float, seen: Seen
) -> int:
    try:
        return process.wait(timeout=pause_s)
    except subprocess.TimeoutExpired:
        if (run / "summary.json").exists():  # over already, the process is on its way out
            return process.wait()
        started = time.perf_counter()
        if number is signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        code = process.wait()
    seen.seconds.append(time.perf_counter() - started)
    seen.codes.append(code)
    newest = newest_checkpoint(run / "checkpoints")
    done = max((line["step"] for line in metrics_of(run) if line["kind"] == "train"), default=0)
    seen.steps_redone.append(done - (0 if newest is None else step_of(newest)))
    return code


def recipe_command(ranks: int, assignments: Sequence[str]) -> list[str]:
    """Begin the shapes recipe or go on with it; the run's folder comes behind."""
    launcher = ["-m", "recipes.launch.ranks", str(ranks), sys.executable]
    settings = [argument for assignment in assignments for argument in ("--set", assignment)]
    return [
        sys.executable,
        *(launcher if ranks > 1 else []),
        *("-m", "recipes.shapes"),
        *settings,
        "--run",
    ]


def start(run: Path, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Begin or go on, in a session of its own, so that a kill takes all ranks."""
    return subprocess.Popen(
        [*command, str(run)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def rows(stopped: Seen, killed: Seen) -> list[Row]:
    """The table."""
    p95 = sorted(stopped.seconds)[round(0.95 * (len(stopped.seconds) - 1))]
    asked = sum(code == REQUEUE_EXIT_CODE for code in stopped.codes)
    return [
        _row(
            "SIGTERM to the end, 95th percentile", p95, "s", stopped.seconds, f"under {P95_S:g}", p95 < P95_S
        ),
        _row("SIGTERM to the end, median", statistics.median(stopped.seconds), "s", stopped.seconds),
        _row(
            f"ends with {REQUEUE_EXIT_CODE}",
            asked,
            "of them",
            [asked],
            f"all {len(stopped.codes)}",
            asked == len(stopped.codes),
        ),
        _row(
            "steps redone after SIGTERM, most",
            max(stopped.steps_redone),
            "steps",
            stopped.steps_redone,
            "at most 1",
            max(stopped.steps_redone) <= 1,
        ),
        _row("steps redone after SIGKILL, most", max(killed.steps_redone), "steps", killed.steps_redone),
        _row("stopped runs end alike", stopped.ends_alike, "", [stopped.ends_alike], "1", stopped.ends_alike),
        _row("killed runs end alike", killed.ends_alike, "", [killed.ends_alike], "1", killed.ends_alike),
    ]


def _row(
    metric: str,
    value: float,
    unit: str,
    values: list[float] | list[int] | list[bool],
    target: str | None = None,
    holds: bool | None = None,
) -> Row:
    return Row(
        metric=metric,
        value=float(value),
        unit=unit,
        runs=len(values),
        min=float(min(values)),
        max=float(max(values)),
        target=target,
        holds=holds,
    )


def _is_alike(run: Path, whole: Path) -> bool:
    weights, others = weights_of(run), weights_of(whole)
    return (
        metrics_of(run) == metrics_of(whole)
        and experience_of(run) == experience_of(whole)
        and weights.keys() == others.keys()
        and all(value.equal(others[name]) for name, value in weights.items())
    )


def _log_file(run: Path) -> int | None:
    """Which file the log is: a start that opens it makes another."""
    path = run / "metrics.jsonl"
    return path.stat().st_ino if path.exists() else None


def _wait_until_open(run: Path, process: subprocess.Popen[bytes], before: int | None) -> None:
    deadline = time.monotonic() + START_S
    while _log_file(run) in (None, before):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"{run}: did not start to train, code {process.returncode}")
        time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    main()
