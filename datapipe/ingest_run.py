"""One pass over the sources: judge, settle, count, and write in commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final

from datapipe.heap import release_freed_memory
from datapipe.judge import INDEX_KINDS, Judge, Row
from datapipe.judge_sources import JudgedSources
from datapipe.judge_texts import TextColumns
from datapipe.known_rows import KnownRows
from datapipe.open_faults import OpenFaults
from datapipe.outcome_writer import OutcomeWriter
from datapipe.outcomes import Met, Outcome, Resolved, SourceProgress
from datapipe.settling import DuplicatePolicy, Settling
from datapipe.sources import Fault, Note, Source
from datapipe.tally import Tally
from storage import FeatureStore

__all__ = ["IngestRun"]

_BLOCK_ROWS: Final = 4096  # texts that are judged and written at once


class IngestRun:
    """One pass over the sources. `tally` grows while it runs."""

    def __init__(
        self,
        store: FeatureStore | None,
        sources: Sequence[Source],
        judge: Judge,
        *,
        workers: int,
        should_stop: Callable[[], bool],
        duplicates: DuplicatePolicy = "once",
        met: Met | None = None,
        first_row: int | None = None,
    ) -> None:
        """Args:
        store: What is known already; None for a store that is not made yet.
        sources: Read in this order.
        judge: The rules.
        workers: Threads that read and decode.
        should_stop: Asked between samples.
        duplicates: Whether a sample that differs from another one in its key alone is left out.
        met: What other runs of the same ingest take.
        first_row: Rows of the store from this number on are of the same ingest.
        """
        self.tally = Tally()
        self.progress = [SourceProgress() for _ in sources]
        self._sources = sources
        self._judge = judge
        self._workers = workers
        self._should_stop = should_stop
        self._known = KnownRows(store)
        self._faults = OpenFaults(store)
        self._settling = Settling(
            store,
            self._known,
            self._faults,
            met=met or Met(),
            first_row=first_row,
            duplicates=duplicates,
            tally=self.tally,
            progress=self.progress,
        )

    def examine(self, num_samples: int, update: Callable[[Tally, int], None]) -> None:
        """Count what would happen to the first num_samples samples, and write nothing."""
        for _ in self.news(update, num_samples=num_samples):
            pass

    def commit_all(
        self,
        store: FeatureStore,
        update: Callable[[Tally, int], None],
        *,
        commit_rows: int,
        commit_s: float,
        committed: Callable[[int], None] = lambda num_finished: None,
    ) -> int:
        """Write everything in commits; return how many were made.

        Args:
            store: What is written to.
            update: Told of every sample.
            commit_rows: A commit ends after so many samples,
            commit_s: or with the first sample after so many seconds.
            committed: Told after each commit how many sources are in the store to their end.
        """
        num_commits = 0
        release_freed_memory()  # of the look at the sources
        news = self.news(update, block_rows=min(_BLOCK_ROWS, commit_rows))
        for first in news:
            deadline = time.monotonic() + commit_s
            last = first
            tensors = self._judge.media.tensor_columns()
            with store.writer(
                message=f"ingest {first.source.name}", columns=self.column_kinds(), tensors=tensors
            ) as writer:
                count, rows = 0, OutcomeWriter(writer, self._judge.media)
                for outcome in chain([first], news):
                    rows.write(outcome)
                    last = outcome
                    count += len(outcome.result) if isinstance(outcome.result, TextColumns) else 1
                    if count >= commit_rows or time.monotonic() >= deadline:
                        break
                rows.flush()
            self._settling.committed(store.refresh())
            num_commits += 1
            committed(last.source_index)
            release_freed_memory()
        if not self.tally.is_interrupted:
            committed(len(self._sources))
        return num_commits

    def column_kinds(self) -> dict[str, str]:
        """Types of all metadata columns."""
        return self._judge.kinds.all() | INDEX_KINDS

    def news(
        self, update: Callable[[Tally, int], None], *, num_samples: int | None = None, block_rows: int = 1
    ) -> Iterator[Outcome]:
        """Outcomes that have to be written, in the order of the sources; all outcomes are counted.

        Args:
            update: Told of every sample.
            num_samples: Look at so many only.
            block_rows: Texts that come as one outcome, at most.
        """
        judged = JudgedSources(
            self._sources, self._judge, self._known, workers=self._workers, block_rows=block_rows
        )
        for outcome in judged.outcomes():
            for settled in self._settling.settle(outcome):
                if self._count(settled):
                    yield settled
            update(self.tally, outcome.source_index)
            if num_samples is not None and self.tally.num_seen >= num_samples:
                return
            if self._should_stop():
                self.tally.is_interrupted = True
                return

    def _count(self, settled: Outcome) -> bool:
        """Count an outcome; tell whether it has to be written."""
        result, progress = settled.result, self.progress[settled.source_index]
        if isinstance(result, Note):
            self.tally.add_note(result, settled.full_place)
            return False
        if isinstance(result, Resolved):
            return True
        progress.num_samples += len(result) if isinstance(result, TextColumns) else 1
        if isinstance(result, TextColumns):
            self.tally.add_texts(len(result))
            return True
        if isinstance(result, Row):
            self.tally.add_row(result, settled.full_place)
            return True
        if isinstance(result, Fault):
            progress.num_bad += 1
            self.tally.add_fault(result, settled.full_place)
            return not self._faults.meet(settled.full_place, result.reason)
        self.tally.num_skipped += 1
        return False
