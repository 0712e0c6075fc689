"""What the loader counts, by hand where it can be known."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from datapipe import Loader
from datapipe.loader_stats import LoaderStats, StageStats
from storage import FeatureStore, View


@pytest.fixture
def view(tmp_path: Path) -> View:
    store = FeatureStore.create(tmp_path / "store")
    codes = np.zeros(4, np.int16)
    store.append({"key": f"{n:02d}", "caption": "x", "tensors": {"codes": codes}} for n in range(40))
    return store.refresh().select()


def test_counts_and_bytes(view: View) -> None:
    loader = Loader(view, batch_size=10, image=None, tensors=["codes"])
    assert loader.stats().samples_per_s == 0
    list(loader), list(loader)
    stats = loader.stats()
    assert (stats.batches, stats.samples) == (8, 80)
    assert stats.bytes_read == stats.bytes_copied == 80 * 4 * 2
    groups = 2 * 3  # in each epoch 1, 2 and 1 batches at once
    assert [(stage.name, stage.items) for stage in stats.stages] == [("fetch", groups), ("collate", groups)]
    assert json.loads(json.dumps(stats.to_dict()))["samples"] == 80
    consecutive = Loader(view, batch_size=10, image=None, tensors=["codes"], shuffle=False)
    list(consecutive)
    assert consecutive.stats().bytes_copied == 0


def test_times_of_both_sides(view: View) -> None:
    loader = Loader(view, batch_size=10, image=None)
    for _ in loader:
        time.sleep(0.05)
    stats = loader.stats()
    assert stats.elapsed_s - stats.wait_s >= 0.2


def stage(name: str, busy_s: float) -> StageStats:
    return StageStats(
        name=name, workers=1, items=1, busy_s=busy_s, idle_s=8 - busy_s, blocked_s=2, mean_queue=0
    )


def test_the_bottleneck_is_the_busiest_stage_or_the_caller() -> None:
    facts = {"batches": 5, "samples": 50, "elapsed_s": 10.0, "bytes_read": 0, "bytes_copied": 0}
    stages = (stage("fetch", 1), stage("decode", 7))
    waiting = LoaderStats(**facts, wait_s=6.0, stages=stages)  # type: ignore[arg-type]
    assert (waiting.bottleneck, waiting.samples_per_s, waiting.wait_fraction) == ("decode", 5.0, 0.6)
    assert stages[1].busy_fraction == 0.7
    assert replace(stages[1], workers=0).busy_fraction == 0
    assert LoaderStats(**facts, wait_s=0.4, stages=stages).bottleneck == "caller"  # type: ignore[arg-type]
