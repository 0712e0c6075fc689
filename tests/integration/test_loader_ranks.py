"""Uneven data never hang a collective: all ranks make the same number of steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from storage import FeatureStore

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """97 rows in two shards."""
    path = tmp_path_factory.mktemp("ranks") / "store"
    store = FeatureStore.create(path)
    for start, stop in ((0, 60), (60, 97)):
        store.append({"key": f"{index:03d}", "caption": "x"} for index in range(start, stop))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_agree_on_the_steps(store: Path, importable: None, world_size: int) -> None:
    """Rows that do not divide, fewer rows than ranks, and fewer shards than ranks (TAR-11)."""
    command = [sys.executable, str(HERE / "loader_ranks.py"), str(store), str(world_size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 6
    for seen in found:
        num_rows, batch_size, drop_last = seen["case"]
        full, rest = divmod(num_rows, batch_size)
        sizes = [batch_size] * full + ([rest] if rest and not drop_last else [])
        assert seen["sizes"] == sizes and seen["steps"] == len(sizes)
        assert len(set(seen["rows"])) == len(seen["rows"]) == sum(sizes)
        assert set(seen["rows"]) <= set(np.arange(num_rows).tolist())
