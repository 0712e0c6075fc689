from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from storage import FeatureStore

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    """The names of tests/toy.py."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "toy.py")))


@pytest.fixture(scope="session")
def toy_store(toy: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return toy.make_store(tmp_path_factory.mktemp("toy") / "store")


@pytest.fixture(scope="session")
def importable() -> Iterator[None]:
    """The toy program can be imported here and in every process started from here."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.syspath_prepend(str(HERE))
        yield


@pytest.fixture(scope="session")
def start_toy_run(
    toy_store: FeatureStore, importable: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[multiprocessing.process.BaseProcess, Path]]:
    """Start the toy program in a process of its own, forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["toy_run"])
    program = importlib.import_module("toy_run")
    outputs = tmp_path_factory.mktemp("outputs")

    def start(path: Path, *options: str) -> tuple[multiprocessing.process.BaseProcess, Path]:
        output = outputs / str(len(list(outputs.iterdir())))
        arguments = [str(path), str(toy_store.path), *options]
        process = context.Process(target=program.in_child, args=(arguments, output))
        process.start()
        return process, output

    return start


@pytest.fixture(scope="session")
def toy_run(
    start_toy_run: Callable[..., tuple[multiprocessing.process.BaseProcess, Path]],
) -> Callable[..., tuple[int | None, str]]:
    """Run the toy program to its end; returns its exit code and what it said."""

    def run(path: Path, *options: str) -> tuple[int | None, str]:
        process, output = start_toy_run(path, *options)
        process.join(timeout=300)
        return process.exitcode, output.read_text() if output.exists() else ""

    return run


@pytest.fixture(scope="session")
def launch_toy_run(
    toy_store: FeatureStore, importable: None
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the toy program under a launcher, on several ranks."""

    def launch(launcher: tuple[str, ...], path: Path, *options: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            *launcher,
            str(HERE / "toy_run.py"),
            str(path),
            str(toy_store.path),
            *options,
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)

    return launch


@pytest.fixture(scope="session")
def whole_run(
    toy_run: Callable[..., tuple[int | None, str]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The toy run, never interrupted, in one process."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    code, said = toy_run(path)
    assert code == 0, said
    return path
