"""Slices of sources, and the task that reads one of them and seals its rows as a part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from datapipe.errors import WorkerError
from datapipe.identity import content_of, key_id
from datapipe.ingest_run import IngestRun
from datapipe.judge import Judge, Row
from datapipe.judge_texts import TextColumns
from datapipe.outcome_writer import OutcomeWriter
from datapipe.outcomes import Met, Outcome, Resolved, SourceProgress
from datapipe.settling import DuplicatePolicy
from datapipe.sources import Item, Source
from datapipe.sources.column_kinds import ColumnKinds
from datapipe.sources.text_rows import one_by_one
from datapipe.tally import Tally
from storage import DuplicateKeyError, FeatureStore, SealedPart

__all__ = ["Slice", "SliceResult", "SlicedSource", "cut_sources", "judge_slice"]

_SLICES_PER_WORKER: Final = 2  # of one source, when there are fewer sources than that
_MAX_RACES: Final = 5  # commits of others that a slice gives way to


@dataclass(frozen=True, slots=True)
class Slice:
    """Items start:stop of a source; the last slice of a source has no stop."""

    source_index: int
    start: int
    stop: int | None

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the source."""
        return self.start == 0 and self.stop is None


@dataclass(frozen=True, slots=True)
class SlicedSource:
    """A source of which only some items are read."""

    whole: Source
    start: int
    stop: int | None

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def base(self) -> str:
        return self.whole.base

    def count(self) -> int | None:
        return None

    def observe_columns(self, kinds: ColumnKinds) -> None:
        self.whole.observe_columns(kinds)

    def items(self) -> Iterator[Item]:
        return islice(one_by_one(self.whole.items()), self.start, self.stop)


def cut_sources(sources: Sequence[Source], workers: int) -> list[Slice]:
    """Slices in the order of the sources. Sources are cut only when there are few of them."""
    num_each = math.ceil(_SLICES_PER_WORKER * workers / max(1, len(sources)))
    slices: list[Slice] = []
    for index, source in enumerate(sources):
        count = (source.count() or 0) if num_each > 1 else 0
        step = max(1, math.ceil(count / num_each))
        starts = range(0, max(count, 1), step)
        slices.extend(
            Slice(index, start, None if start + step >= count else start + step) for start in starts
        )
    return slices


@dataclass(frozen=True, slots=True)
class SliceResult:
    """What a task tells the driver. The keys serve to find rows that two slices have both."""

    sealed: SealedPart
    tally: Tally
    progress: SourceProgress
    keys: pa.Array  # string (R,), of the rows of the part
    places: pa.Array  # string (R,)
    key_ids: NDArray[np.uint64]  # (R,)
    contents: NDArray[np.uint64]  # (R,), 0 for rows without media


@dataclass(slots=True)
class _Rows:
    """Rows of a part as they are collected."""

    keys: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Note the rows of an outcome that was written."""
        result = outcome.result
        if isinstance(result, Row):
            digest = result.content_hash
            self.keys.append(result.key)
            self.places.append(outcome.full_place)
            self.contents.append(0 if digest is None else content_of(result, digest))
        elif isinstance(result, TextColumns):
            self.keys.extend(result.keys)
            self.places.extend(f"{outcome.source.base}/{place}" for place in result.places)
            self.contents.extend([0] * len(result))


def judge_slice(
    store_path: Path, source: Source, part: Slice, judge: Judge, duplicates: DuplicatePolicy, met: Met
) -> SliceResult:
    """Read, judge and write one slice; runs in a process of Ray."""
    for race in range(_MAX_RACES):
        store = FeatureStore.open(store_path)
        sliced = SlicedSource(source, part.start, part.stop)
        run = IngestRun(
            store, [sliced], judge, workers=1, should_stop=lambda: False, duplicates=duplicates, met=met
        )
        rows = _Rows()
        try:
            with store.part_writer(
                columns=run.column_kinds(), tensors=judge.media.tensor_columns()
            ) as writer:
                target = OutcomeWriter(writer, judge.media)
                for outcome in run.news(lambda tally, num_finished: None):
                    if isinstance(outcome.result, Resolved) and not part.is_whole:
                        continue  # another slice may have met the fault again
                    target.write(outcome)
                    rows.add(outcome)
                target.flush()
        except DuplicateKeyError:
            if race + 1 == _MAX_RACES:
                raise
            continue  # the driver published another slice meanwhile; now its rows are known
        break
    if writer.sealed is None:
        raise WorkerError(f"{source.name}: the part of items {part.start} and on was not sealed")
    return SliceResult(
        sealed=writer.sealed,
        tally=run.tally,
        progress=run.progress[0],
        keys=pa.array(rows.keys, pa.large_string()),
        places=pa.array(rows.places, pa.large_string()),
        key_ids=np.fromiter(map(key_id, rows.keys), np.uint64, len(rows.keys)),
        contents=np.array(rows.contents, np.uint64),
    )
