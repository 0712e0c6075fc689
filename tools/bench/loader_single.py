"""Measurements of the loader alone: imports, resume, overlap, memory, and the balance of costs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from datapipe import BlockShuffle, TokenBuckets
from tools.bench.loader_data import Sizes, long_tailed
from tools.bench.results import ROOT, Row, median_row
from tools.bench.storage_large import make_large_store

__all__ = ["single_rows"]

_MIB = 1 << 20
_RANKS = 4
_STEPS = 100


def single_rows(folder: Path, pictures: Path, sizes: Sizes, rounds: int) -> list[Row]:
    """Rows of all of them.

    Args:
        folder: Scratch, kept from run to run.
        pictures: A store of pictures.
        sizes: Rows of the data sets.
        rounds: Processes for each measurement.
    """
    large = folder / f"large-{sizes.large}"
    if not (large / "snapshots" / "00000001.json").exists():
        make_large_store(large, sizes.large, max(sizes.large // 10, 1))
    return [
        *_import_rows([_run("imports") for _ in range(rounds + 1)][1:]),
        *_resume_rows([_run("resume", str(large)) for _ in range(rounds)], sizes.large),
        *_overlap_rows([_run("overlap", str(pictures), str(_STEPS)) for _ in range(rounds)]),
        *_memory_rows(_run("memory", str(large)), sizes.large, "keys alone"),
        *_memory_rows(_run("memory", str(large), "width"), sizes.large, "keys and a column"),
        *_balance_rows(sizes.lengths),
    ]


def _run(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.bench.loader_programs", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout)


def _import_rows(found: list[dict[str, Any]]) -> list[Row]:
    bare = [run["seconds"] for run in found]
    whole = [run["with_loader_seconds"] for run in found]
    name = "import datapipe, torch loaded"
    return [
        median_row(name, bare, "s", target="< 0.3", holds=sorted(bare)[len(bare) // 2] < 0.3),
        median_row(f"{name}, and Loader", whole, "s", target="< 0.3", holds=max(whole) < 0.3),
    ]


def _resume_rows(found: list[dict[str, Any]], num_rows: int) -> list[Row]:
    resumed = [1000 * run["resume_seconds"] for run in found]
    fresh = [1000 * run["start_seconds"] for run in found]
    ratios = sorted(mine / theirs for mine, theirs in zip(resumed, fresh))
    return [
        median_row(
            f"resume in mid-epoch to the first batch, {num_rows:,} rows",
            resumed,
            "ms",
            peer="a start",
            peer_values=fresh,
            target="<= 1, 1.1 with noise",
            holds=ratios[len(ratios) // 2] <= 1.1,
        )
    ]


def _overlap_rows(found: list[dict[str, Any]]) -> list[Row]:
    data_ms = 1000 * sorted(run["data_seconds"] for run in found)[len(found) // 2]
    rows = []
    for name in ("waiting", "computing"):
        loop = [1000 * run[f"{name}_with_data"] / _STEPS for run in found]
        alone = [1000 * run[f"{name}_alone"] / _STEPS for run in found]
        ratios = sorted(mine / theirs for mine, theirs in zip(loop, alone))
        rows.append(
            median_row(
                f"step of a {name} model with data of {data_ms:.0f} ms",
                loop,
                "ms",
                peer="the model alone",
                peer_values=alone,
                target="<= 1.1",
                holds=ratios[len(ratios) // 2] <= 1.1,
            )
        )
    rows.append(
        median_row(
            "step of a computing model beside another process that makes the same data",
            [1000 * run["computing_beside"] / _STEPS for run in found],
            "ms",
            peer="the model alone",
            peer_values=[1000 * run["computing_alone"] / _STEPS for run in found],
        )
    )
    return rows


def _memory_rows(found: dict[str, Any], num_rows: int, what: str) -> list[Row]:
    epochs = [size / _MIB for size in found["epochs"]]
    first, growth = found["first"] / _MIB, epochs[-1] - epochs[0]
    most = max(first, *epochs)
    name = f"private memory of a worker over {num_rows:,} rows, {what}, beyond the imports"
    return [
        median_row(name, [first, *epochs], "MiB", target="< 60", holds=most < 60),
        median_row(f"{name}: growth from epoch 1 to 5", [growth], "MiB", target="< 2", holds=growth < 2),
    ]


def _balance_rows(num_rows: int) -> list[Row]:
    lengths = long_tailed(num_rows)
    slowest, even, padding, seconds = [], [], [], []
    for budget in (32_768, 65_536, 131_072):
        buckets = TokenBuckets(lengths, token_budget=budget)
        for epoch in range(3):
            started = time.perf_counter()
            batches = buckets.batches(
                BlockShuffle().positions(num_rows, seed=0, epoch=epoch),
                num_rows=num_rows,
                num_samples=num_rows,
                seed=0,
                epoch=epoch,
                drop_last=True,
            )
            seconds.append(time.perf_counter() - started)
            balance = batches.balance(_RANKS)
            slowest.append(balance.slowest_over_mean)
            even.append(balance.even_fraction)
            padding.append(balance.padding_fraction)
    title = f"{num_rows:,} long-tailed lengths, {_RANKS} ranks"
    return [
        median_row(
            f"{title}: slowest rank over the mean, summed over the steps",
            slowest,
            "x",
            target="<= 1.05",
            holds=max(slowest) <= 1.05,
        ),
        median_row(f"{title}: share of the steps within 1.05 x the mean", even, "of 1"),
        median_row(f"{title}: padding", padding, "of 1", target="< 0.08", holds=max(padding) < 0.08),
        median_row(f"{title}: cutting an epoch", seconds, "s"),
    ]
