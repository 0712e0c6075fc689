from __future__ import annotations

import importlib
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from accelerate.tracking import GeneralTracker

from unirl.errors import ConfigError
from unirl.trainer import trackers
from unirl.trainer.metrics import MetricsLog

FAKE = """
told = []

class Run:
    def log(self, values, step=None):
        told.append((step, values))
    def finish(self):
        told.append("finished")

def init(project, **options):
    told.append((project, options))
    return Run()
"""


@pytest.fixture
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_the_variable_names_trackers_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNIRL_TRACKERS", raising=False)
    assert trackers.named_trackers() == ()
    monkeypatch.setenv("UNIRL_TRACKERS", "wandb, tensorboard,mlflow,wandb,")
    assert trackers.named_trackers() == ("wandb", "mlflow")


def test_an_unknown_tracker_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no tracker 'wandbb'; did you mean 'wandb'"):
        trackers.open_trackers(["wandbb"], tmp_path)


def test_a_missing_package_is_one_sentence_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(ConfigError, match=r"mlflow needs a package .* pip install mlflow") as error:
        trackers.open_trackers(["mlflow"], tmp_path)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.usefixtures("quiet_environment")
def test_a_tracker_is_told_the_numbers_of_every_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's class drives a stand-in of the package."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "trackio.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["trackio"])
    run = tmp_path / "red"
    run.mkdir()
    PartialState(cpu=True)

    log = MetricsLog(run, last_step=-1, trackers=trackers.open_trackers(["trackio"], run))
    log.write(3, {"stage": "text", "kind": "train"}, {"reward/mean": 0.5, "value/loss": math.nan})
    log.close()

    told: list[Any] = importlib.import_module("trackio").told
    assert told == [("unirl", {"name": "red"}), (3, {"text/reward/mean": 0.5}), "finished"]
    assert os.environ["WANDB_MODE"] == "offline"
    assert os.environ["MLFLOW_TRACKING_URI"].startswith("file:")


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_environment")
@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("wandb", "run/wandb/offline-run-*/run-*.wandb"),
        ("mlflow", "run/mlflow/*/*/metrics/text/reward/mean"),
        ("trackio", "trackio/unirl.db"),
    ],
)
def test_a_tracker_itself_keeps_the_numbers_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, left: str
) -> None:
    for variable in ("TRACKIO_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "trackio"))
    monkeypatch.delitem(sys.modules, name, raising=False)  # the stand-in of the test above
    pytest.importorskip(name, reason=f"needs the tracker: pip install {name}")
    run = tmp_path / "run"
    run.mkdir()
    PartialState(cpu=True)
    for last_step in (-1, 1):  # a run that goes on opens them again
        log = MetricsLog(run, last_step=last_step, trackers=trackers.open_trackers([name], run))
        log.write(
            last_step + 1, {"stage": "text", "kind": "train"}, {"reward/mean": 0.5, "kl/text": math.nan}
        )
        log.close()
    found = [path for path in tmp_path.glob(left) if path.stat().st_size]
    assert found, [str(path) for path in tmp_path.rglob("*")]


def test_the_classes_are_those_of_accelerate() -> None:
    for make in trackers._MAKERS.values():
        assert isinstance(make(Path("runs/x")), GeneralTracker)
