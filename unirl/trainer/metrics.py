"""Metrics: one JSON object a line, and the same numbers in TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

__all__ = ["MetricsLog"]


class MetricsLog:
    """Appends to `metrics.jsonl`. NaN is written as null: the file is plain JSON."""

    def __init__(self, run: Path, *, last_step: int, num_lines: int | None = None) -> None:
        """Open the log of a run that has done `last_step` steps; lines of later steps are dropped.

        Args:
            run: Its directory.
            last_step: Steps done.
            num_lines: Lines that were there then; None keeps all up to that step.
        """
        self._path = run / "metrics.jsonl"
        kept = [line for line in self._lines() if json.loads(line)["step"] <= last_step][:num_lines]
        self.num_lines = len(kept)
        """Lines of the file."""
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(kept))
        partial.rename(self._path)
        self._file = self._path.open("a")
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
        return line

    def lines(self) -> list[dict[str, Any]]:
        """The lines written so far, over all starts of the run."""
        return [json.loads(line) for line in self._lines()]

    def close(self) -> None:
        """Close both outputs."""
        self._file.close()
        self._board.close()

    def _lines(self) -> list[str]:
        """Whole lines of the file; a line that a kill cut short is left out."""
        if not self._path.exists():
            return []
        return [line for line in self._path.read_text().splitlines(keepends=True) if line.endswith("\n")]
