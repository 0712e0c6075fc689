"""How fast and how large an update and a whole step are, beside a bare loop and TRL's GRPO trainer.

python -m tools.bench.trainer [--rounds 5] [--threads 2] [--quick] [--no-peers]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from tools.bench.peers import Library, peer_python
from tools.bench.process_memory import PeakMemory
from tools.bench.results import ROOT, Row, median_row, write_results
from tools.bench.trainer_data import make_data

Answers = dict[str, list[dict[str, Any]]]
"""By the module of the trainer, one answer a round."""
PARTS = ("generation", "scoring", "forward", "backward", "optimizer")
NAMES = {"bare_loop": "bare loop", "trl_grpo": "TRL's GRPOTrainer", "ours": "this trainer"}
_PEER_PACKAGES = ("trl", "transformers", "accelerate", "torch")


def main() -> None:
    """Measure in rounds in which each trainer has a turn, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="short rows, one round, no other library")
    parser.add_argument("--no-peers", action="store_true", help="leave out the other library")
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "bench" / "trainer")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    rounds, length, longest = (1, 16, 64) if options.quick else (options.rounds, 128, 512)
    has_peers = not (options.quick or options.no_peers)
    python = peer_python(ROOT / "runs" / "bench" / "storage") if has_peers else None
    make_data(options.data / "data", response_length=length, longest=longest)
    bench = Bench(options.data, rounds, python)
    rows = update_rows(bench.measure("even", ("ours", "bare_loop", "trl_grpo")), length)
    rows += tail_rows(bench.measure("tails", ("ours", "bare_loop", "trl_grpo")), longest)
    rows += precision_rows(bench, python is None)
    rows += step_rows(bench.measure("step", ("ours", "trl_grpo")), length)
    notes = [_note(options.threads, length, longest), *bench.notes]
    if python is not None:
        notes.append(f"The other library: {_versions(python)}.")
    if options.quick or options.no_peers:
        print("\n".join(map(str, [*rows, *notes])))
    else:
        print(write_results("trainer", rows, notes=notes).with_suffix(".md").read_text())


class Bench:
    """Runs tasks, each trainer in a process of its own, all of them in every round."""

    def __init__(self, folder: Path, rounds: int, python: Path | None) -> None:
        self.notes: list[str] = []
        self._folder, self._rounds, self._python = folder, rounds, python

    def measure(self, task: str, modules: Sequence[str], tasks: Sequence[str] = ()) -> Answers:
        """The answers of every trainer to a task; a first round, which warms up, counts nowhere.

        Args:
            task: What is asked.
            modules: Who is asked; the other library only if there is an environment for it.
            tasks: Ask the first module for these instead, and give the answers by their names.
        """
        log = self._folder / "trainers.log"
        named = {name: (modules[0], name) for name in tasks} or {module: (module, task) for module in modules}
        if self._python is None:
            named.pop("trl_grpo", None)
        answers: Answers = {name: [] for name in named}
        with ExitStack() as open_processes:
            processes: dict[str, Library] = {}
            for name, (module, wanted) in named.items():
                interpreter = self._python if module == "trl_grpo" else Path(sys.executable)
                assert interpreter is not None
                library = Library(interpreter, module, log, package="trainer_libraries")
                processes[name] = open_processes.enter_context(closing(library))
                folder = self._folder / task / module
                self._ask(library, "open", wanted, data=str(self._folder / "data"), folder=str(folder))
            for number in range(self._rounds + 1):
                turns = list(named)
                for name in turns[number % len(turns) :] + turns[: number % len(turns)]:
                    with PeakMemory(processes[name].pid) as memory:
                        answer = self._ask(processes[name], "run", named[name][1], round=number)
                    if number:
                        answers[name].append({**answer, "bytes": memory.peak_bytes})
        return answers

    def _ask(self, library: Library, do: str, task: str, **details: Any) -> dict[str, Any]:
        """The answer.

        Raises:
            RuntimeError: If the trainer failed; the log has its traceback.
        """
        answer = library.ask(do, task, **details)
        if "error" in answer:
            raise RuntimeError(
                f"{library.module}, {task}: {answer['error']}; see {self._folder / 'trainers.log'}"
            )
        return answer


def update_rows(answers: Answers, length: int) -> list[Row]:
    """Tokens a second and memory of one update with responses of equal length."""
    _require_same_gradient(answers)
    rows = [
        _speed_row(f"update, 64 x (4 + {length}) tokens", answers, peer, at_least)
        for peer, at_least in (("bare_loop", 0.95), ("trl_grpo", 1.15))
        if peer in answers
    ]
    return rows + _memory_rows("peak memory of an update", answers)


def tail_rows(answers: Answers, longest: int) -> list[Row]:
    """The same where lengths differ."""
    _require_same_gradient(answers)
    rows = [
        _speed_row(f"update, lengths 16 to {longest}", answers, peer, at_least)
        for peer, at_least in (("bare_loop", None), ("trl_grpo", 1.8))
        if peer in answers
    ]
    return rows + _memory_rows(f"peak memory, lengths 16 to {longest}", answers)


def precision_rows(bench: Bench, is_short: bool) -> list[Row]:
    """bf16 against fp32, where the processor multiplies matrices of bf16."""
    if not has_amx():
        bench.notes.append("bf16 was not measured: the processor has no AMX.")
        return []
    answers = bench.measure("precision", ("ours",), ("even-bf16", "even"))
    speeds, peers = (_speeds(answers[name]) for name in ("even-bf16", "even"))
    ratio = median_row("", speeds, "", peer_values=peers).ratio or 0.0
    return [
        median_row(
            "update in bf16",
            speeds,
            "tokens/s",
            peer="in fp32",
            peer_values=peers,
            target="ratio at least 1.2",
            holds=None if is_short else ratio >= 1.2,
        )
    ]


def step_rows(answers: Answers, length: int) -> list[Row]:
    """A whole step, and the share of it that is none of generation, scoring, model and optimizer."""
    ours = answers["ours"]
    seconds = [answer["seconds"] for answer in ours]
    shares = [1.0 - sum(answer[part] for part in PARTS) / answer["seconds"] for answer in ours]
    orchestration = median_row(
        "share of a step that is orchestration", shares, "", target="under 0.05", holds=max(shares) < 0.05
    )
    parts = [median_row(f"step: {part}", [answer[part] for answer in ours], "s") for part in PARTS]
    if "trl_grpo" not in answers:
        return [median_row("whole step", seconds, "s"), *parts, orchestration]
    theirs = [answer["seconds"] for answer in answers["trl_grpo"]]
    speeds, peers = [1.0 / s for s in seconds], [1.0 / s for s in theirs]
    ratio = median_row("", speeds, "", peer_values=peers).ratio or 0.0
    whole = median_row(
        f"whole GRPO step, 64 x {length} new tokens",
        speeds,
        "steps/s",
        peer=f"{NAMES['trl_grpo']} with transformers",
        peer_values=peers,
        target="ratio at least 2.5",
        holds=ratio >= 2.5,
    )
    return [whole, *parts, orchestration]


def has_amx() -> bool:
    """Whether the processor has tiles for bf16."""
    path = Path("/proc/cpuinfo")
    return path.exists() and "amx_bf16" in path.read_text()


def _speed_row(metric: str, answers: Answers, peer: str, at_least: float | None) -> Row:
    speeds, peers = _speeds(answers["ours"]), _speeds(answers[peer])
    ratio = median_row("", speeds, "", peer_values=peers).ratio or 0.0
    return median_row(
        metric,
        speeds,
        "tokens/s",
        peer=NAMES[peer],
        peer_values=peers,
        target=None if at_least is None else f"ratio at least {at_least:g}",
        holds=None if at_least is None else ratio >= at_least,
    )


def _memory_rows(metric: str, answers: Answers) -> list[Row]:
    """The most that a process ever took, all of the library in it."""
    peaks = {name: [max(a["bytes"] for a in answer) / 1e9] for name, answer in answers.items()}
    return [
        median_row(
            metric,
            peaks["ours"],
            "GB",
            peer=NAMES[peer],
            peer_values=peaks[peer],
            target="ratio at most 1" if peer == "trl_grpo" else None,
            holds=peaks["ours"] <= peaks[peer] if peer == "trl_grpo" else None,
        )
        for peer in ("bare_loop", "trl_grpo")
        if peer in peaks
    ]


def _speeds(answers: Sequence[dict[str, Any]]) -> list[float]:
    return [answer["tokens"] / answer["seconds"] for answer in answers]


def _require_same_gradient(answers: Answers) -> None:
    """Refuse to compare trainers that did not learn the same: every round's gradients have one norm."""
    for number, answer in enumerate(answers["ours"]):
        for name, theirs in answers.items():
            norm = theirs[number]["grad_norm"]
            if abs(norm - answer["grad_norm"]) > 1e-2 * answer["grad_norm"]:
                raise RuntimeError(
                    f"round {number}: the gradient's norm is {answer['grad_norm']:.6g} here and {norm:.6g} "
                    f"in {NAMES[name]}, so they do not train on the same loss"
                )


def _note(threads: int, length: int, longest: int) -> str:
    return (
        f"{threads} threads, a Llama of 2.9M parameters, fp32, GRPO without KL, AdamW, gradients clipped at "
        "1; each trainer in a process of its own, in turns. In every round all come to the same norm of the "
        f"gradient. Tokens are those of prompts and responses without padding; lengths from 16 to {longest} "
        "lie evenly on a log scale. This trainer packs rows into micro-batches of 4,224 tokens where lengths "
        "are equal and 8,192 where not; the others take all rows at once (TRL could add up smaller batches "
        f"too, without packing). Memory is that of the process, libraries included. "
        f"A whole step samples {length} tokens for each of 64 rows, "
        "scores them by a rule and updates once; the divergence from a reference is not watched, so neither "
        "runs one. Here the samples are also written to the experience store."
    )


def _versions(python: Path) -> str:
    script = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = subprocess.run(
        [str(python), "-c", script, *_PEER_PACKAGES], capture_output=True, text=True, check=True
    )
    return ", ".join(f"{name} {text}" for name, text in zip(_PEER_PACKAGES, found.stdout.split()))


if __name__ == "__main__":
    main()
