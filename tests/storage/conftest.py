from __future__ import annotations

import importlib.util
import multiprocessing
import shutil
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from storage import FeatureStore

_PROGRAMS = "killed_programs"


def sample_blob(i: int) -> bytes:
    return bytes([i % 251]) * (i * 37 % 6000) + str(i).encode()


def sample_codes(i: int) -> np.ndarray:
    return (np.arange(8) + 100 * i).astype(np.int16)


def fill(store: FeatureStore, start: int, stop: int) -> FeatureStore:
    """One commit of rows k<start> .. k<stop-1>, each with a blob, a tensor and columns."""
    with store.writer(message=f"{start}:{stop}", tensors={"codes": ("int16", (8,))}) as writer:
        for i in range(start, stop):
            writer.add(
                f"k{i:05d}",
                sample_blob(i),
                {"codes": sample_codes(i)},
                caption=f"sample {i}",
                width=i,
                split="train" if i % 2 else "eval",
                score=i / 4,
            )
    return store.refresh()


@pytest.fixture
def empty(tmp_path: Path) -> FeatureStore:
    return FeatureStore.create(tmp_path / "store")


@pytest.fixture
def filled(empty: FeatureStore) -> FeatureStore:
    """Two parts of 60 and 40 rows."""
    return fill(fill(empty, 0, 60), 60, 100)


@pytest.fixture
def cold(filled: FeatureStore, tmp_path: Path) -> Path:
    """A copy of the filled store of which this process has read nothing yet."""
    return Path(shutil.copytree(filled.path, tmp_path / "cold"))


@pytest.fixture
def filler() -> Callable[[FeatureStore, int, int], FeatureStore]:
    return fill


@pytest.fixture
def blob_of() -> Callable[[int], bytes]:
    return sample_blob


@pytest.fixture
def codes_of() -> Callable[[int], np.ndarray]:
    return sample_codes


@pytest.fixture(scope="module")
def killed_programs() -> ModuleType:
    """The programs that the kill tests run in children, by the name under which the children find them."""
    spec = importlib.util.spec_from_file_location(_PROGRAMS, Path(__file__).with_name(f"{_PROGRAMS}.py"))
    programs = sys.modules[_PROGRAMS] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(programs)
    return programs


@pytest.fixture(scope="module")
def forkserver() -> Iterator[ForkServerContext]:
    """Children that start in milliseconds and have no threads of ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        patch.syspath_prepend(str(Path(__file__).parent))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_PROGRAMS])
        yield context
