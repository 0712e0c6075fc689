"""Experiment trackers beside TensorBoard, through Accelerate's classes, by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from accelerate.tracking import (
    GeneralTracker,
    MLflowTracker,
    TrackioTracker,
    WandBTracker,
    get_available_trackers,
)

from unirl.config import nearest
from unirl.errors import ConfigError

__all__ = ["named_trackers", "open_trackers"]

VARIABLE = "UNIRL_TRACKERS"
PROJECT = "unirl"

_MAKERS: Final[Mapping[str, Callable[[Path], GeneralTracker]]] = {
    "mlflow": lambda run: MLflowTracker(experiment_name=PROJECT, run_name=run.name),
    "trackio": lambda run: TrackioTracker(PROJECT, name=run.name),
    "wandb": lambda run: WandBTracker(PROJECT, name=run.name, dir=str(run)),
}


def named_trackers() -> tuple[str, ...]:
    """Names in the environment variable UNIRL_TRACKERS, such as `wandb,mlflow`; TensorBoard is always there.

    Where numbers are shown is no part of a run, so a run that goes on may have other trackers.
    """
    names = (name.strip() for name in os.environ.get(VARIABLE, "").split(","))
    return tuple(dict.fromkeys(name for name in names if name and name != "tensorboard"))


def open_trackers(names: Sequence[str], run: Path) -> list[GeneralTracker]:
    """Start trackers that know the run by the name of its directory.

    None of them needs the network unless its own environment variables say so: wandb writes into the run's
    directory (`WANDB_MODE=online` sends), mlflow into `mlflow/` there (`MLFLOW_TRACKING_URI` names a server).

    Raises:
        ConfigError: If a name is unknown, or the package of a tracker is not installed.
    """
    available = set(map(str, get_available_trackers()))
    for name in names:
        if name not in _MAKERS:
            raise ConfigError(f"{VARIABLE}: there is no tracker {name!r}{nearest(name, _MAKERS)}")
        if name not in available:
            raise ConfigError(
                f"{VARIABLE}: the tracker {name} needs a package that is not installed; "
                f"pip install {name}, or leave it out: TensorBoard and metrics.jsonl are always written"
            )
    os.environ.setdefault("WANDB_MODE", "offline")
    if "MLFLOW_TRACKING_URI" not in os.environ:
        os.environ["MLFLOW_TRACKING_URI"] = (run.resolve() / "mlflow").as_uri()
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow 3 wants plain files to be asked for
    trackers = [_MAKERS[name](run) for name in names]
    for tracker in trackers:
        tracker.start()
    return trackers
