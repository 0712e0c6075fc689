from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from storage import FeatureStore


@pytest.fixture(scope="session")
def finished_run(
    toy: SimpleNamespace, toy_store: FeatureStore, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A whole toy run, text stage and image stage; tests read it and leave it as it is."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    toy.make_trainer(run, toy_store).train()
    return run
