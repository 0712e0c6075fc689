"""Progress with an estimate: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["StepBar", "step_bar"]

log = logging.getLogger("unirl.progress")
LINE_EVERY_S = 10.0


class StepBar:
    """Counts steps of one piece of work."""

    def __init__(self, title: str, total: int, bar: Progress | None) -> None:
        self._title, self._total, self._bar = title, total, bar
        self._task = bar.add_task(title, total=total, note="") if bar else None
        self._started = self._said = time.monotonic()
        self._first: int | None = None

    def update(self, done: int, values: Mapping[str, float]) -> None:
        """Say that `done` steps are done, with a few numbers to show."""
        note = "  ".join(f"{name} {value:.3g}" for name, value in values.items())
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, note=note)
            return
        now = time.monotonic()
        self._first = done - 1 if self._first is None else self._first
        if now - self._said >= LINE_EVERY_S or done == self._total:
            self._said = now
            left = (now - self._started) / max(done - self._first, 1) * (self._total - done)
            log.info("%s: %d of %d, %.0f s left  %s", self._title, done, self._total, left, note)


@contextmanager
def step_bar(title: str, total: int, *, show: bool = True) -> Iterator[StepBar]:
    """Show a bar while the block runs; without a terminal, write log lines instead."""
    console = Console(stderr=True)
    if not (show and console.is_terminal):
        yield StepBar(title, total, None)
        return
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bar:
        yield StepBar(title, total, bar)
