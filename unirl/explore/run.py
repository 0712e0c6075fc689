"""Read a run directory as it stands, whether the run has ended, goes on, or was cut off."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage import FeatureStore, StorageError
from unirl.errors import ConfigError
from unirl.explore.scores import Scores

__all__ = ["Line", "Run", "number", "open_run"]

Line = Mapping[str, Any]
"""One line of `metrics.jsonl`: `step`, `stage`, `stage_step`, `wall_s`, `kind` and the metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run directory holds. Parts that are not there yet are empty, and `notes` says so."""

    path: Path
    header: Mapping[str, Any]
    """`run.json`: recipe, config, commit, versions, seed, snapshot, store, command, created."""
    train: Sequence[Line]
    """Lines of kind "train", one per update."""
    evals: Sequence[Line]
    """Lines of kind "eval", one per evaluation and direction."""
    alarms: Sequence[Line]
    """Lines of kind "alarm": `alarm` (its name), `message` and the numbers behind it, `alarm/...`."""
    summary: Mapping[str, Any]
    """`summary.json`, written when the whole recipe is done."""
    scores: Scores | None
    data: FeatureStore | None
    """The data store at the snapshot that the run trained on."""
    notes: Sequence[str]
    """One sentence for each part that is missing or damaged."""

    @property
    def stages(self) -> list[str]:
        """Names of the stages in the order in which they were trained."""
        return list(dict.fromkeys(str(line.get("stage", "")) for line in self.train))

    @property
    def directions(self) -> list[str]:
        """Directions that were evaluated, in order of first appearance."""
        return list(dict.fromkeys(str(line["direction"]) for line in self.evals if line.get("direction")))


def open_run(run_dir: str | Path) -> Run:
    """Read a run directory.

    Raises:
        ConfigError: If the directory does not exist, or holds nothing of a run.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such run directory; `runs/NAME` is made when a recipe starts")
    notes: list[str] = []
    header = _read_object(path / "run.json", notes, "recipe, seed and versions are unknown")
    lines = _read_lines(path / "metrics.jsonl", notes)
    summary = _read_object(path / "summary.json", notes, "the run goes on, or was cut off")
    run = Run(
        path=path,
        header=header,
        train=[line for line in lines if line.get("kind") == "train"],
        evals=[line for line in lines if line.get("kind") == "eval"],
        alarms=[line for line in lines if line.get("kind") == "alarm"],
        summary=summary,
        scores=_open_scores(path, notes),
        data=_open_data(path, header, notes),
        notes=notes,
    )
    if not header and not lines and run.scores is None:
        raise ConfigError(f"{path}: not a run directory, it holds no run.json, metrics.jsonl or experience")
    return run


def number(line: Line, name: str) -> float:
    """Return a metric as a finite float, or NaN where the line lacks it or holds something else."""
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    return float(value)


def _read_object(path: Path, notes: list[str], meaning: str) -> dict[str, Any]:
    if not path.exists():
        notes.append(f"{path.name} is not there yet: {meaning}.")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        notes.append(f"{path.name} cannot be read ({error}): {meaning}.")
        return {}
    if isinstance(value, dict):
        return value
    notes.append(f"{path.name} holds no JSON object: {meaning}.")
    return {}


def _read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Read JSON lines; a line that a kill cut in two is skipped and counted."""
    if not path.exists():
        notes.append(f"{path.name} is not there yet: there are no curves.")
        return []
    lines: list[dict[str, Any]] = []
    damaged = 0
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if isinstance(value, dict):
            lines.append(value)
        elif text.strip():
            damaged += 1
    if damaged:
        total = damaged + len(lines)
        notes.append(f"{path.name}: {damaged} of {total} lines could not be read and are left out.")
    return lines


def _open_scores(path: Path, notes: list[str]) -> Scores | None:
    try:
        return Scores.open(path)
    except (ConfigError, StorageError) as error:
        notes.append(f"There are no galleries: {error}.")
        return None


def _open_data(path: Path, header: Mapping[str, Any], notes: list[str]) -> FeatureStore | None:
    named = [Path(str(header["store"]))] if header.get("store") else []
    for candidate in [*named, path / "store"]:
        if (candidate / "snapshots").is_dir():
            try:
                snapshot = header.get("snapshot")
                return FeatureStore.open(candidate, snapshot=snapshot if isinstance(snapshot, int) else None)
            except StorageError as error:
                notes.append(f"The data store cannot be opened: {error}.")
                return None
    notes.append("The data store is not where the run had it, so the health of the data is not shown.")
    return None
