"""A training on two ranks goes on after kills with the same losses, bit for bit."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from storage import FeatureStore

HERE = Path(__file__).parent
NUM_STEPS = 90


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """93 pictures in two shards, each with codes and a number that can be told from it."""
    rng = np.random.default_rng(0)
    path = tmp_path / "store"
    store = FeatureStore.create(path)
    for rows in (range(60), range(60, 93)):
        store.append(_row(number, rng) for number in rows)
    return path


def _row(number: int, rng: np.random.Generator) -> dict[str, object]:
    pixels = rng.integers(0, 256, (16, 16, 3)) // 4 + number * 2
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, "PNG")
    tensors = {"codes": rng.integers(0, 100, 4).astype(np.int16)}
    return {"key": f"{number:03d}", "blob": buffer.getvalue(), "number": number, "tensors": tensors}


def _train(store: Path, run: Path, *options: str) -> dict[str, object]:
    command = [sys.executable, str(HERE / "loader_training.py"), str(store), str(run), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(run / "checkpoint.pt", weights_only=True)


@pytest.mark.slow
def test_ten_kills_leave_the_loss_curve_as_it_was(store: Path, importable: None, tmp_path: Path) -> None:
    whole = _train(store, tmp_path / "whole")
    killed = _train(store, tmp_path / "killed", "--kills", "10", "--seed", "3")
    assert len(whole["losses"]) == NUM_STEPS
    assert killed["losses"] == whole["losses"]
    first, last = (np.mean([float.fromhex(loss) for loss in part]) for part in _ends(whole["losses"]))
    assert last < first / 2
    for value, other in zip(killed["weights"], whole["weights"], strict=True):
        assert value.equal(other)
    assert json.loads(killed["loader"]) == json.loads(whole["loader"])
    starts = list((tmp_path / "killed").glob("meeting-*"))
    assert len(starts) == 11


def _ends(losses: list[str]) -> tuple[list[str], list[str]]:
    return losses[:12], losses[-12:]
