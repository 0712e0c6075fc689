"""Metrics: one JSON object a line, and the same numbers in TensorBoard and any other tracker."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker
from torch.utils.tensorboard import SummaryWriter

__all__ = ["MetricsLog"]

log = logging.getLogger("unirl.trainer.metrics")


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
        if num_lines is not None and self.num_lines < num_lines:
            log.warning(
                "%s: had %d lines when the state was saved, and %d of these are whole; the others are lost",
                self._path,
                num_lines,
                self.num_lines,
            )
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

    def sync(self) -> None:
        """See the lines to the disk, so that a checkpoint that counts them finds them after a power cut."""
        os.fsync(self._file.fileno())

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
        """Lines of the file up to one that a kill cut short or a power cut made no JSON."""
        if not self._path.exists():
            return []
        lines = self._path.read_text(errors="replace").splitlines(keepends=True)
        return list(itertools.takewhile(_is_whole, lines))


def _is_whole(line: str) -> bool:
    try:
        return line.endswith("\n") and isinstance(json.loads(line), dict)
    except ValueError:
        return False
