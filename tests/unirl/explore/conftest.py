from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from unirl.explore import Scores


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    return runpy.run_path(str(Path(__file__).parents[2] / "run_directory.py"))["make_run"]


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Path]) -> Path:
    """A finished run; tests read it and leave it as it is."""
    return make_run(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture(scope="session")
def scores(run_dir: Path) -> Scores:
    return Scores.open(run_dir)
