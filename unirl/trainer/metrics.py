"""Metrics: one JSON object a line, and the same numbers in TensorBoard and any other tracker."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker
from torch.utils.tensorboard import SummaryWriter

__all__ = ["MetricsLog"]


class MetricsLog:
    """Appends to `metrics.jsonl`. NaN is written as null: the file is plain JSON."""

    def __init__(
        self,
        run: Path,
        *,
        last_step: int,
        num_lines: int | None = None,
        trackers: Sequence[GeneralTracker] = (),
    ) -> None:
        """Open the log of a run that has done `last_step` steps; lines of later steps are dropped.

        Args:
            run: Its directory.
            last_step: Steps done.
            num_lines: Lines that were there then; None keeps all up to that step.
            trackers: Are told the same numbers, those that are finite, under `STAGE/NAME`; ended by `close`.
        """
        self._path = run / "metrics.jsonl"
        kept = [line for line in self._lines() if json.loads(line)["step"] <= last_step][:num_lines]
        self.num_lines = len(kept)
        """Lines of the file."""
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(kept))
        partial.rename(self._path)
        self._file = self._path.open("a")
        self._trackers = tuple(trackers)
        self._board = SummaryWriter(str(run / "tensorboard"), purge_step=last_step + 1)

    def write(
        self, step: int, labels: Mapping[str, str | int | float], values: Mapping[str, float]
    ) -> dict[str, Any]:
        """Append one line: the step, what tells the line apart, and the numbers; returns the line."""
        plain = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = {"step": step, **labels, **plain}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self.num_lines += 1
        for name, value in values.items():
            self._board.add_scalar(f"{labels['stage']}/{name}", value, step)
        self._board.flush()
        finite = {f"{labels['stage']}/{name}": value for name, value in plain.items() if value is not None}
        for tracker in self._trackers:
            tracker.log(finite, step=step)
        return line

    def lines(self) -> list[dict[str, Any]]:
        """The lines written so far, over all starts of the run."""
        return [json.loads(line) for line in self._lines()]

    def close(self) -> None:
        """Close every output."""
        self._file.close()
        self._board.close()
        for tracker in self._trackers:
            tracker.finish()

    def _lines(self) -> list[str]:
        """Whole lines of the file; a line that a kill cut short is left out."""
        if not self._path.exists():
            return []
        return [line for line in self._path.read_text().splitlines(keepends=True) if line.endswith("\n")]
