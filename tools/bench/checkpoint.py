"""How long a checkpoint holds training up: written in the background, beside one that is waited for.

python -m tools.bench.checkpoint [--parameters 100] [--rounds 5] [--directory DIR] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from tools.bench.results import Row, median_row, write_results
from unirl.trainer.checkpoint import load_checkpoint, newest_checkpoint
from unirl.trainer.checkpoint_saver import CheckpointSaver

WIDTH = 1024
ALLOWED = 0.10
PASSES = 10


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=100, help="millions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--quick", action="store_true", help="10 million parameters, 3 rounds")
    options = parser.parse_args()
    millions, rounds = (10, 3) if options.quick else (options.parameters, options.rounds)
    model, optimizer = trained(millions)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        rows = measure(Path(directory), model, optimizer, rounds=rounds)
    num_bytes = 3 * 4 * sum(p.numel() for p in model.parameters())
    path = write_results(
        "checkpoint",
        rows,
        notes=[
            f"{millions} million fp32 parameters with AdamW's two moments, {num_bytes / 1e9:.2f} GB, "
            f"{torch.get_num_threads()} threads; rounds are interleaved. Waited for: until the files are "
            "synced and the folder is renamed. Between a save and the next change of the weights lies a "
            "rollout; here it is forward passes, and the copy in memory goes on beside them."
        ],
    )
    print(path.with_suffix(".md").read_text())


def trained(millions: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Square layers with an optimizer that has state for each of them."""
    layers = round(millions * 1_000_000 / WIDTH**2)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def measure(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, rounds: int) -> list[Row]:
    """Steps without a save, with one in the background and with one that is waited for, in turn."""
    saver = CheckpointSaver([directory], keep=1)
    saver.save(step=0, model=model, optimizer=optimizer, state={})
    saver.finish()
    alone: list[float] = []
    blocked: list[float] = []
    beside: list[float] = []
    waited: list[float] = []
    at_once: list[float] = []
    for step in range(1, rounds + 1):
        alone.append(_seconds(lambda: roll_out(model)))
        save = partial(saver.save, step=step, model=model, optimizer=optimizer, state={})
        returned = _seconds(save)
        beside.append(_seconds(lambda: roll_out(model)))
        blocked.append(returned + _seconds(saver.wait_for_copy))
        saver.finish()
        at_once.append(_seconds(save) + _seconds(saver.wait_for_copy))
        saver.finish()
        waited.append(_seconds(save) + _seconds(saver.finish))
    path = newest_checkpoint(directory)
    assert path is not None
    loaded = _seconds(lambda: load_checkpoint(path, model=model, optimizer=optimizer))
    saver.close()
    ratio = statistics.median(blocked) / statistics.median(waited)
    return [
        median_row(
            "training waits for a save",
            blocked,
            "s",
            peer="a save that is waited for",
            peer_values=waited,
            target=f"ratio at most {ALLOWED:g}",
            holds=ratio <= ALLOWED,
        ),
        median_row(
            "the same, where the weights change at once",
            at_once,
            "s",
            peer="a save that is waited for",
            peer_values=waited,
        ),
        median_row(
            "forward passes while it is written", beside, "s", peer="without a save", peer_values=alone
        ),
        median_row("reading it back, checksums included", [loaded], "s"),
    ]


@torch.no_grad()
def roll_out(model: nn.Module) -> None:
    """Stand for what comes between a save and the next update: forward passes for some seconds."""
    rows = torch.ones(64, WIDTH)
    for _ in range(PASSES):
        model(rows)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
