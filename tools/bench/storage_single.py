"""Measurements of the feature store alone: a store of many shards, and one of very many rows."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from storage import FeatureStore
from tools.bench.results import ROOT, Row, median_row
from tools.bench.storage_large import make_large_store

__all__ = ["first_batch_rows", "large_index_rows"]

_SHARD_ROWS = 20
_MIB = 1 << 20


def first_batch_rows(folder: Path, num_shards: int, rounds: int) -> list[Row]:
    """Seconds from opening a store of many shards to its first shuffled batch, in new processes."""
    if not (folder / "snapshots" / "00000001.json").exists():
        _write_shards(FeatureStore.create(folder, exist_ok=True), num_shards)
    found = [_run("first_batch", folder).split() for _ in range(rounds + 1)][1:]
    opening, batch = ([float(times[i]) for times in found] for i in (0, 1))
    whole = [a + b for a, b in zip(opening, batch)]
    metric = f"opening {num_shards} shards"
    total = median_row(f"{metric} and a shuffled batch of 256", whole, "s", target="under 0.1 s")
    return [
        _judged(total, total.value < 0.1),
        median_row(f"{metric} alone", opening, "s"),
    ]


def _write_shards(store: FeatureStore, num_shards: int) -> None:
    rng = np.random.default_rng(0)
    parts = []
    for shard in range(num_shards):
        with store.part_writer(tensors={"image": (np.uint8, (3, 64, 64))}) as writer:
            for row in range(_SHARD_ROWS):
                image = rng.integers(0, 256, (3, 64, 64), np.uint8)
                writer.add(f"{shard:05d}-{row:03d}", None, {"image": image}, width=row)
        assert writer.sealed is not None
        parts.append(writer.sealed)
    store.publish_parts(parts)


def large_index_rows(folder: Path, num_rows: int, rounds: int) -> list[Row]:
    """Time and private memory of opening a view of all rows, and of workers forked from it."""
    if not (folder / "snapshots" / "00000001.json").exists():
        make_large_store(folder, num_rows, max(num_rows // 10, 1))
    found = [json.loads(_run("large_index", folder)) for _ in range(rounds)]
    metric = f"{num_rows / 1e6:g} million rows"
    seconds = median_row(f"{metric}: opening", [f["seconds"] for f in found], "s", target="under 1 s")
    memory = median_row(
        f"{metric}: private memory", [f["bytes"] / _MIB for f in found], "MiB", target="under 200 MiB"
    )
    workers = median_row(
        f"{metric}: more in a forked worker",
        [max(f["worker_bytes"]) / _MIB for f in found],
        "MiB",
        target="under 50 MiB",
    )
    return [
        _judged(seconds, seconds.max < 1),
        _judged(memory, memory.max < 200),
        _judged(workers, workers.max < 50),
    ]


def _run(module: str, store: Path) -> str:
    command = [sys.executable, "-m", f"tools.bench.storage_libraries.{module}", str(store)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def _judged(row: Row, holds: bool) -> Row:
    return replace(row, holds=holds)
