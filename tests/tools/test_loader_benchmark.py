"""The benchmark's own arithmetic, and our side of its tasks at a tiny size."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from tools.bench.loader_data import Sizes, make_data
from tools.bench.loader_libraries import bare_gather, bare_loop, ours
from tools.bench.loader_rows import first_rows, picture_rows, tensor_rows
from tools.bench.process_memory import PeakMemory

SIZES = Sizes(pictures=128, shards=4, tensors64=512, tensors224=8, large=100, lengths=100)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_data(folder, SIZES)
    return folder


def test_our_pictures_are_those_of_the_bare_loop(data: Path, tmp_path: Path) -> None:
    tasks = {
        "ours": ours.Pictures(data, tmp_path / "ours"),
        "bare_loop": bare_loop.Pictures(data, tmp_path / "bare_loop"),
    }
    measured = {name: [{**task.run(1), "peak_bytes": 100 << 20}] for name, task in tasks.items()}
    assert {run["rows"] for runs in measured.values() for run in runs} == {128}
    measured["lit"] = [{**measured["ours"][0], "seconds": 1e6, "peak_bytes": 200 << 20}]
    rows = {row.peer: row for row in picture_rows(measured)}
    assert rows["LitData, the best of them"].holds and rows["LitData, the leanest"].ratio == 0.5
    measured["lit"][0]["sum"] += 1
    with pytest.raises(ValueError, match="did not deliver the same pictures"):
        picture_rows(measured)


def test_our_tensors_copy_as_many_bytes_as_they_have(data: Path, tmp_path: Path) -> None:
    mine, bare = ours.Tensors(data, tmp_path / "ours"), bare_gather.Tensors(data, tmp_path / "bare")
    rows = tensor_rows({"64": {"ours": [mine.run(1)], "bare_gather": [bare.run(1)]}})
    copied = {row.metric: (row.value, row.holds) for row in rows if row.unit == "bytes"}
    assert copied == {
        "bytes copied for a sample of 3x64x64, shuffled": (3 * 64 * 64, True),
        "bytes copied for a sample of 3x64x64, consecutive": (0, True),
    }


def test_the_first_batch_comes_out_of_many_shards(data: Path, tmp_path: Path) -> None:
    task = ours.First(data / "shards", tmp_path / "ours")
    rows = first_rows({"ours": [task.run(1)]}, 4)
    assert [row.unit for row in rows] == ["ms"] * 3


def test_memory_of_a_process_is_sampled() -> None:
    with PeakMemory(os.getpid()) as memory:
        block = np.ones(20 << 20, np.uint8)
        while memory.peak_bytes == 0:
            time.sleep(0.05)
    assert memory.peak_bytes > len(block)
