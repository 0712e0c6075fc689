"""One pass over the sources: judge in threads, refuse what was met before, write in commits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import xxhash

from datapipe.errors import DecodeError
from datapipe.judge import INDEX_KINDS, Judge, Row, checked_key
from datapipe.known_rows import KnownRows, content_id, key_id, place_of_row
from datapipe.report import Tally
from datapipe.sources import Fault, Note, Record, Source
from storage import FeatureStore, KeyNotFoundError, Writer

__all__ = ["IngestRun"]

_QUEUE_PER_WORKER: Final = 4


@dataclass(frozen=True, slots=True)
class _Skip:
    """A sample that the store has already."""

    key: str
    place: str


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of one item of a source."""

    source: Source
    source_index: int
    result: Row | Fault | Note | _Skip

    @property
    def full_place(self) -> str:
        return f"{self.source.base}/{self.result.place}"


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
    ) -> None:
        """Args:
        store: What is known already; None for a store that is not made yet.
        sources: Read in this order.
        judge: The rules.
        workers: Threads that read and decode.
        should_stop: Asked between samples.
        """
        self.tally = Tally()
        self._sources = sources
        self._judge = judge
        self._workers = workers
        self._should_stop = should_stop
        self._known = KnownRows(store)
        self._known_faults = set() if store is None else _stored_faults(store)
        self._newest = store
        self._pending: dict[str, str] = {}  # key -> place, of the rows in the open commit

    def examine(self, num_samples: int, update: Callable[[Tally, int], None]) -> None:
        """Count what would happen to the first num_samples samples, and write nothing."""
        for _ in self._news(update, num_samples):
            pass

    def commit_all(
        self,
        store: FeatureStore,
        update: Callable[[Tally, int], None],
        *,
        commit_rows: int,
        commit_s: float,
    ) -> int:
        """Write everything in commits; return how many were made.

        Args:
            store: What is written to.
            update: Told of every sample.
            commit_rows: A commit ends after so many samples,
            commit_s: or with the first sample after so many seconds.
        """
        num_commits = 0
        news = self._news(update)
        for first in news:
            kinds = self._judge.kinds.all() | INDEX_KINDS
            deadline = time.monotonic() + commit_s
            with store.writer(message=f"ingest {first.source.name}", columns=kinds) as writer:
                for count, outcome in enumerate(chain([first], news), start=1):
                    self._write(outcome, writer)
                    if count >= commit_rows or time.monotonic() >= deadline:
                        break
            self._pending.clear()
            self._newest = store.refresh()
            num_commits += 1
        return num_commits

    def _news(
        self, update: Callable[[Tally, int], None], num_samples: int | None = None
    ) -> Iterator[_Outcome]:
        """Outcomes that have to be written, in the order of the sources; all outcomes are counted."""
        for outcome in self._judged():
            settled = self._settle(outcome)
            if isinstance(settled.result, Row):
                content = content_id(_blob_hash(settled.result), settled.result.caption)
                is_duplicate = content in self._known.contents
                self._known.contents.add(content)
                self.tally.add_row(settled.result, settled.full_place, is_duplicate=is_duplicate)
                yield settled
            elif isinstance(settled.result, Fault):
                self.tally.add_fault(settled.result, settled.full_place)
                if (settled.full_place, settled.result.reason) not in self._known_faults:
                    yield settled
            elif isinstance(settled.result, Note):
                self.tally.add_note(settled.result, settled.full_place)
            else:
                self.tally.num_skipped += 1
            update(self.tally, settled.source_index)
            if num_samples is not None and self.tally.num_seen >= num_samples:
                return
            if self._should_stop():
                self.tally.is_interrupted = True
                return

    def _judged(self) -> Iterator[_Outcome]:
        """Judge records in threads, a bounded number ahead, and keep the order."""
        waiting: deque[tuple[Source, int, Future[Row | Fault] | Row | Fault | Note | _Skip]] = deque()
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="ingest")
        try:
            for index, source in enumerate(self._sources):
                for item in source.items():
                    waiting.append((source, index, self._begin(item, source, pool)))
                    if len(waiting) > self._workers * _QUEUE_PER_WORKER:
                        yield _finish(*waiting.popleft())
            while waiting:
                yield _finish(*waiting.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _begin(
        self, item: Record | Fault | Note, source: Source, pool: ThreadPoolExecutor
    ) -> Future[Row | Fault] | Row | Fault | Note | _Skip:
        if not isinstance(item, Record):
            return item
        try:
            key = checked_key(item.key)
        except DecodeError:
            return pool.submit(self._judge, item, source.name)
        known = self._known.find(key)
        if known is not None and (known.source, known.place) == (source.name, item.place):
            return _Skip(key, item.place)
        if item.load is None:
            return self._judge(item, source.name)  # text alone is not worth a thread
        return pool.submit(self._judge, item, source.name)

    def _settle(self, outcome: _Outcome) -> _Outcome:
        """Refuse a key that was met before in this run, or that the store has with another content."""
        result = outcome.result
        if not isinstance(result, Row | _Skip):
            return outcome
        identity = key_id(result.key)
        if identity in self._known.seen_keys:
            first = self._pending.get(result.key) or self._committed_place(result.key)
            if first is not None:
                return replace(outcome, result=_duplicate(result, outcome.full_place, first))
        self._known.seen_keys.add(identity)
        if isinstance(result, _Skip):
            return outcome
        known = self._known.find(result.key)
        if known is None:
            self._pending[result.key] = outcome.full_place
            return outcome
        if known.hash == _blob_hash(result) and known.caption == result.caption:
            return replace(outcome, result=_Skip(result.key, result.place))
        return replace(outcome, result=_duplicate(result, outcome.full_place, known.full_place))

    def _committed_place(self, key: str) -> str | None:
        try:
            return None if self._newest is None else place_of_row(self._newest, key)
        except KeyNotFoundError:
            return None  # two keys of one hash

    def _write(self, outcome: _Outcome, writer: Writer) -> None:
        result = outcome.result
        if isinstance(result, Fault):
            writer.quarantine(
                key=result.key,
                place=outcome.full_place,
                reason=f"{result.reason}: {result.detail}",
                data=result.data,
            )
        elif isinstance(result, Row):
            writer.add(result.key, result.blob, None, **result.index_columns())


def _duplicate(result: Row | _Skip, full_place: str, first: str) -> Fault:
    return Fault(
        key=result.key,
        place=result.place,
        reason="duplicate_key",
        detail=f"key {result.key!r} stands at {first} and at {full_place}; the first was kept",
        data=(result.blob or b"") if isinstance(result, Row) else b"",
    )


def _finish(source: Source, index: int, item: Future[Row | Fault] | Row | Fault | Note | _Skip) -> _Outcome:
    return _Outcome(source, index, item.result() if isinstance(item, Future) else item)


def _blob_hash(row: Row) -> str | None:
    return None if row.blob is None else xxhash.xxh3_128_hexdigest(row.blob)


def _stored_faults(store: FeatureStore) -> set[tuple[str, str]]:
    table = store.quarantined()
    reasons = (reason.partition(":")[0] for reason in table.column("reason").to_pylist())
    return set(zip(table.column("place").to_pylist(), reasons))
