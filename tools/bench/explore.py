"""What it takes to explore a run of a million samples: time of each look, and the memory of the process.

python -m tools.bench.explore [--rows 1000000] [--quick]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from storage import FeatureStore
from tools.bench.process_memory import PeakMemory, private_bytes
from tools.bench.results import ROOT, Row, write_results
from unirl import explore

ROWS_PER_COMMIT = 25_000
MOST_BYTES = 512 << 20


def main() -> None:
    """Make the store in another process, look at it in every way, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="100,000 rows")
    parser.add_argument("--make", type=Path, help="only make the store there")
    options = parser.parse_args()
    num = 100_000 if options.quick else options.rows
    if options.make is not None:
        make_experience(options.make, num)
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "experience"
        maker = [sys.executable, "-m", "tools.bench.explore", "--rows", str(num), "--make", str(path)]
        subprocess.run(maker, check=True, cwd=ROOT)
        size = sum(file.stat().st_size for file in (path / "index").glob("*.parquet"))
        rows = measure(path)
    result = write_results(
        "explore",
        rows,
        notes=[
            f"{num:,} samples in commits of {ROWS_PER_COMMIT:,}, {size >> 20} MB of Parquet. Memory is what "
            "the process took at the most beyond what it had before the store was opened: anonymous and "
            "shared pages."
        ],
        packages=("unirl", "duckdb", "pyarrow", "numpy"),
    )
    print(result.with_suffix(".md").read_text())


def make_experience(path: Path, num: int) -> None:
    """A store of `num` scored samples without pictures, their prompts 200 letters of noise each."""
    rng = np.random.default_rng(0)
    store = FeatureStore.create(path)
    for step, first in enumerate(range(0, num, ROWS_PER_COMMIT)):
        rows = min(ROWS_PER_COMMIT, num - first)
        scores, is_eval = rng.random((rows, 2)), np.arange(rows) % 4 == 0
        columns = {
            "kind": np.where(is_eval, "eval", "train").tolist(),
            "stage": ["image"] * rows,
            "direction": ["image"] * rows,
            "step": [step] * rows,
            "prompt_key": [f"p{row % 20_000:05d}" for row in range(rows)],
            "prompt": [rng.bytes(100).hex() for _ in range(rows)],
            "reward": scores.mean(axis=1).tolist(),
            "judge": np.where(is_eval, scores[:, 0] > 0.5, np.nan).tolist(),
            "reward/vlm": scores[:, 0].tolist(),
            "reward/length": scores[:, 1].tolist(),
        }
        with store.writer(message=f"step {step}") as writer:
            writer.add_rows([f"{step:04d}/{row:06d}" for row in range(rows)], columns)
        store = store.refresh()


def measure(path: Path) -> list[Row]:
    """Time and memory of every look, in the order in which a notebook takes them."""
    before = private_bytes(os.getpid())
    scores = explore.Scores.open(path)
    hard = scores.where("reward/vlm < 0.2 and stage = 'image'")
    looks: dict[str, Callable[[], object]] = {
        "count": lambda: len(hard),
        "summary": scores.summary,
        "agreement": scores.agreement,
        "drift": lambda: explore.drift(scores),
        "calibration": lambda: explore.calibration(scores, "reward/vlm"),
        "best 8": lambda: scores.best(8),
        "one prompt's history": lambda: scores.history("p00007"),
        "two runs side by side": lambda: explore.compared({"hard": hard, "all": scores}),
        "figure of a component": lambda: explore.component_over_steps(scores, "reward/vlm"),
    }
    rows = []
    for name, look in looks.items():
        with PeakMemory(os.getpid()) as memory:
            started = time.perf_counter()
            look()
            seconds = time.perf_counter() - started
        grown = max(memory.peak_bytes, private_bytes(os.getpid())) - before
        rows.append(Row(metric=f"{name}, time", value=seconds, unit="s", runs=1, min=seconds, max=seconds))
        rows.append(
            Row(
                metric=f"{name}, memory",
                value=grown / 2**20,
                unit="MB",
                runs=1,
                min=grown / 2**20,
                max=grown / 2**20,
                target="at most 512",
                holds=grown <= MOST_BYTES,
            )
        )
    return rows


if __name__ == "__main__":
    main()
