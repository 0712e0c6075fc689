from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from storage import FeatureStore


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    """The names of tests/toy.py."""
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "toy.py")))


@pytest.fixture(scope="session")
def toy_store(toy: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    """32 rows with pictures, captions and codes; tests read it and leave it as it is."""
    return toy.make_store(tmp_path_factory.mktemp("toy") / "store")
