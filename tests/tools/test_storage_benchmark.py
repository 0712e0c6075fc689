"""The benchmark's own arithmetic, and our side of its tasks at a tiny size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.bench.results import median_row
from tools.bench.storage_data import Sizes, make_data
from tools.bench.storage_libraries import bare_numpy, ours
from tools.bench.storage_rows import epoch_rows, lookup_rows

SIZES = Sizes(images64=40, images224=8, vectors=300, pictures=6, shards=3, large=100)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_data(folder, SIZES)
    return folder


def test_ratios_are_taken_within_a_round() -> None:
    row = median_row("speed", [10.0, 40.0, 20.0], "1/s", peer="other", peer_values=[5.0, 10.0, 20.0])
    assert (row.value, row.min, row.max, row.peer_value) == (20.0, 10.0, 40.0, 10.0)
    assert (row.ratio, row.ratio_min, row.ratio_max) == (2.0, 1.0, 4.0)


def test_our_tasks_deliver_what_the_bare_ones_do(data: Path, tmp_path: Path) -> None:
    tasks = {
        ("ours", "epoch64"): ours.Epoch64(data, tmp_path / "images64" / "ours"),
        ("bare_numpy", "epoch64"): bare_numpy.Gather64(data, tmp_path / "images64" / "bare_numpy"),
    }
    measured = {contender: [task.run(1), task.run(2)] for contender, task in tasks.items()}
    measured["peer", "epoch64"] = [{**run, "seconds": 100.0} for run in measured["ours", "epoch64"]]
    with pytest.raises(KeyError, match="peer"):
        epoch_rows(measured, "epoch64", "3x64x64", peer_factor=15)
    measured["mds", "epoch64"] = measured.pop(("peer", "epoch64"))
    rows = epoch_rows(measured, "epoch64", "3x64x64", peer_factor=15)
    assert [row.holds for row in rows if row.peer == "MDS"] == [True]
    measured["mds", "epoch64"][0]["sum"] = -1
    with pytest.raises(ValueError, match="did not deliver the same rows"):
        epoch_rows(measured, "epoch64", "3x64x64", peer_factor=15)


def test_views_copy_nothing(data: Path, tmp_path: Path) -> None:
    task = ours.Consecutive(data, tmp_path / "ours")
    assert task.run(1) | {"seconds": 0} == {"seconds": 0, "rows": 40, "bytes_copied": 0}


def test_look_ups_find_the_vector(data: Path, tmp_path: Path) -> None:
    tasks = {
        ("ours", "lookup"): ours.Lookup(data, tmp_path / "vectors" / "ours"),
        ("bare_numpy", "lookup"): bare_numpy.HashIndex(data, tmp_path / "vectors" / "bare_numpy"),
    }
    rows = lookup_rows({contender: [task.run(1)] for contender, task in tasks.items()})
    assert [row.peer for row in rows] == [None, "mapped hash index"] * 2
    found = ours.Filter(data, tmp_path / "vectors" / "ours").run(1)
    assert 0 < found["rows"] < 300


def test_writing_leaves_nothing_behind(data: Path, tmp_path: Path) -> None:
    task = ours.Write(data, tmp_path / "ours")
    assert task.run(1)["bytes"] == sum(np.diff([0, *np.load(data / "pictures.npy")]))
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["complete"]
