"""Slices of sources, and the work on one of them: read it, judge it, seal its rows as a part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from datapipe.errors import WorkerError
from datapipe.identity import content_of, key_id
from datapipe.ingest_run import IngestRun
from datapipe.judge import Judge, Row
from datapipe.judge_texts import TextColumns
from datapipe.outcome_writer import OutcomeWriter
from datapipe.outcomes import Met, Outcome, Resolved
from datapipe.ray_receipt import SliceReceipt
from datapipe.settling import DuplicatePolicy, may_be_left_out
from datapipe.sources import Item, Source
from datapipe.sources.column_kinds import ColumnKinds
from datapipe.sources.text_rows import one_by_one
from storage import DuplicateKeyError, FeatureStore

__all__ = ["Slice", "SliceRules", "SlicedSource", "cut_sources", "judge_slice"]

_SLICES_PER_WORKER: Final = 2  # of one source, when there are fewer sources than that
_MAX_RACES: Final = 5  # commits of the driver that a slice gives way to


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


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceRules:
    """What holds for all slices of a run."""

    store_path: Path
    first_row: int  # the first number that a row of this run can get
    judge: Judge
    duplicates: DuplicatePolicy


@dataclass(slots=True)
class _Rows:
    """Rows of a part as they are collected."""

    keys: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)

    def add(self, outcome: Outcome, duplicates: DuplicatePolicy) -> None:
        """Note the rows of an outcome that was written."""
        result = outcome.result
        if isinstance(result, Row):
            digest = result.content_hash
            is_compared = digest is not None and duplicates == "once" and may_be_left_out(result)
            self.keys.append(result.key)
            self.places.append(outcome.full_place)
            self.contents.append(content_of(result, digest) if is_compared and digest is not None else 0)
        elif isinstance(result, TextColumns):
            self.keys.extend(result.keys)
            self.places.extend(f"{outcome.source.base}/{place}" for place in result.places)
            self.contents.extend([0] * len(result))


def judge_slice(
    number: int, source: Source, part: Slice, rules: SliceRules, met: Met, should_stop: Callable[[], bool]
) -> SliceReceipt:
    """Read, judge and write one slice, in a process of Ray.

    Nothing of it is in the store before the driver publishes the part that the receipt speaks of, so that it
    may be done again at any point.

    Args:
        number: Of the slice, for its receipt.
        source: Its source, whole.
        part: What is read of it.
        rules: Of the run.
        met: Keys and contents of earlier slices that are not published yet.
        should_stop: Asked between samples; the receipt is then for what came before.
    """
    for race in range(_MAX_RACES):
        store = FeatureStore.open(rules.store_path)
        run = IngestRun(
            store,
            [SlicedSource(source, part.start, part.stop)],
            rules.judge,
            workers=1,
            should_stop=should_stop,
            duplicates=rules.duplicates,
            met=met,
            first_row=rules.first_row,
        )
        rows = _Rows()
        try:
            with store.part_writer(
                columns=run.column_kinds(), tensors=rules.judge.media.tensor_columns()
            ) as writer:
                target = OutcomeWriter(writer, rules.judge.media)
                for outcome in run.news(lambda tally, num_finished: None):
                    if isinstance(outcome.result, Resolved) and not part.is_whole:
                        continue  # another slice may have met the fault again
                    target.write(outcome)
                    rows.add(outcome, rules.duplicates)
                target.flush()
        except DuplicateKeyError:
            if race + 1 == _MAX_RACES:
                raise
            continue  # the driver published another slice meanwhile; now its rows are known
        break
    if writer.sealed is None:
        raise WorkerError(f"{source.name}: the part of items {part.start} and on was not sealed")
    return SliceReceipt.of_part(
        number,
        writer.sealed,
        run.tally,
        run.progress[0],
        keys=rows.keys,
        places=rows.places,
        key_ids=[key_id(key) for key in rows.keys],
        contents=rows.contents,
    )
