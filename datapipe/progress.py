"""The progress bar of an ingest: rate, estimate, bad samples. Only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from datapipe.sources.record import Source
from datapipe.tally import Tally

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(sources: Sequence[Source], *, is_wanted: bool) -> Iterator[Callable[[Tally, int], None]]:
    """Show a bar on standard error while the block runs, when that is a terminal.

    Yields:
        A function that takes the tally and the number of finished sources.
    """
    if not is_wanted or not sys.stderr.isatty():
        yield lambda tally, num_finished: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("ingest"),
        BarColumn(),
        TextColumn("{task.completed}/{task.fields[expected]} samples"),
        TextColumn("{task.fields[rate]}/s"),
        TextColumn("{task.fields[bad]} bad"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        task = progress.add_task("ingest", total=None, expected="?", rate="?", bad=0)
        counts: list[int] = []

        def update(tally: Tally, num_finished: int) -> None:
            while len(counts) <= num_finished < len(sources):
                counts.append(sources[len(counts)].count() or 0)
            # Sources that are not opened yet are taken to be as long as those that are.
            expected = max(tally.num_seen, round(sum(counts) * len(sources) / max(len(counts), 1)))
            speed = progress.tasks[0].speed
            progress.update(
                task,
                completed=tally.num_seen,
                total=expected,
                expected=expected,
                rate="?" if speed is None else f"{speed:.0f}",
                bad=tally.reasons.total(),
            )

        yield update
