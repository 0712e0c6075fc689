"""Bring samples from files into a store: every picture decoded once, nothing lost, nothing doubled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Final

import xxhash

from datapipe.decode.image import DEFAULT_MAX_PIXELS
from datapipe.errors import DataError, DecodeError
from datapipe.judge import Judge, Row, checked_key
from datapipe.known_rows import KnownRows, content_id, key_id, place_of_row
from datapipe.progress import progress_bar
from datapipe.report import BadFractionError, IngestReport, Tally
from datapipe.sources import Fault, FieldMap, Note, Record, Source, open_sources
from datapipe.sources.column_kinds import ColumnKinds
from datapipe.sources.webdataset import SplitDot
from storage import FeatureStore, KeyNotFoundError, Writer

__all__ = ["ingest"]

_QUEUE_PER_WORKER: Final = 4
_OPTIONAL: Final = frozenset({"image", "caption"})


@dataclass(frozen=True, slots=True)
class _Skip:
    """A sample that the store has, from the same place."""

    key: str


@dataclass(frozen=True, slots=True)
class _Outcome:
    source: Source
    source_index: int
    result: Row | Fault | Note | _Skip

    @property
    def full_place(self) -> str:
        place = "" if isinstance(self.result, _Skip) else self.result.place
        return f"{self.source.base}/{place}"


def ingest(
    source: str | Path | Sequence[str | Path],
    store: str | Path,
    *,
    format: str | None = None,
    column_map: Mapping[str, str] | None = None,
    optional: Sequence[str] = (),
    key_prefix: str | None = None,
    split_dot: SplitDot = "first",
    max_bad_fraction: float = 0.0,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    workers: int = 2,
    commit_rows: int = 10_000,
    progress: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
) -> IngestReport:
    """Read samples, check them completely and commit the good ones.

    Blobs are stored as they came; width and height in the index are those after rotation. A rerun
    continues: rows that the store has from the same place are skipped without being read. Samples that
    cannot be used go to the store's quarantine with place and reason, once.

    Args:
        source: Folders, tars, tables, or patterns of them.
        store: Folder of the store; made if it is not there.
        format: `folder`, `webdataset` or `table`; None tells them apart.
        column_map: Ours to theirs, as in {"caption": "text", "key": "id"}.
        optional: Of `image` and `caption`: may be absent without making a sample bad.
        key_prefix: Put before each key; None puts a tar's or table's name before keys that are not unique
            outside of it.
        split_dot: Whether a key in a tar ends at the `first` or the `last` dot of the file name.
        max_bad_fraction: Share of bad samples, 0..1, that is still a success.
        max_pixels: Pictures whose header claims more are quarantined.
        workers: Threads that read and decode.
        commit_rows: Samples in a commit. A kill loses at most the work on so many.
        progress: Show a bar when standard error is a terminal.
        should_stop: Asked between samples; True commits what is whole and returns.

    Returns:
        The report, which also lies in `STORE/reports/` when something was committed.

    Raises:
        BadFractionError: When the bad share is over the budget, after the good rows are committed.
        SourceError: When a source cannot be read at all, before anything is written.
        StorageError: When the store cannot be used.
    """
    _check_arguments(optional, max_bad_fraction, max_pixels, workers, commit_rows)
    started = time.monotonic()
    specs = [source] if isinstance(source, str | Path) else list(source)
    fields = FieldMap(mapping=dict(column_map or {}))
    sources = open_sources(specs, format=format, fields=fields, key_prefix=key_prefix, split_dot=split_dot)
    kinds = ColumnKinds()
    for opened in sources:
        opened.observe_columns(kinds)
    target = FeatureStore.create(store, exist_ok=True)
    kinds.fit_store(target.columns)
    judge = Judge(kinds=kinds, optional=frozenset(optional), max_pixels=max_pixels)
    run = _Run(target, sources, judge, workers=workers, should_stop=should_stop)
    with progress_bar(sources, is_wanted=progress) as update:
        num_commits = run.commit_all(commit_rows, update)
    report = run.tally.freeze(
        sources=tuple(opened.name for opened in sources),
        store=str(store),
        snapshot=target.refresh().snapshot.id,
        max_bad_fraction=max_bad_fraction,
        wall_s=time.monotonic() - started,
    )
    if num_commits:
        report.write(target.path / "reports")
    if report.is_over_budget:
        raise BadFractionError(report)
    return report


class _Run:
    """One pass over the sources."""

    def __init__(
        self,
        store: FeatureStore,
        sources: Sequence[Source],
        judge: Judge,
        *,
        workers: int,
        should_stop: Callable[[], bool],
    ) -> None:
        self.tally = Tally()
        self._store = store
        self._sources = sources
        self._judge = judge
        self._workers = workers
        self._should_stop = should_stop
        self._known = KnownRows(store)
        self._known_faults = _stored_faults(store)
        self._newest: FeatureStore | None = None
        self._pending: dict[str, str] = {}  # key -> place, of the rows in the open commit

    def commit_all(self, commit_rows: int, update: Callable[[Tally, int], None]) -> int:
        """Write everything in commits of at most commit_rows samples; return how many were made."""
        num_commits = 0
        news = self._news(update)
        for first in news:
            kinds = {
                name: kind for name in self._judge.kinds.names() if (kind := self._judge.kinds.kind(name))
            }
            with self._store.writer(message=f"ingest {first.source.name}", columns=kinds) as writer:
                for outcome in chain([first], islice(news, commit_rows - 1)):
                    self._write(outcome, writer)
            self._pending.clear()
            self._newest = None
            num_commits += 1
        return num_commits

    def _news(self, update: Callable[[Tally, int], None]) -> Iterator[_Outcome]:
        """Outcomes that have to be written, in the order of the sources; all outcomes are counted."""
        for outcome in self._judged():
            settled = self._settle(outcome)
            if isinstance(settled.result, Row):
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
            if self._should_stop():
                self.tally.is_interrupted = True
                return

    def _judged(self) -> Iterator[_Outcome]:
        """Judge records in threads, a bounded number ahead, and keep the order."""
        waiting: deque[tuple[Source, int, Future[Row | Fault] | Fault | Note | _Skip]] = deque()
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
    ) -> Future[Row | Fault] | Fault | Note | _Skip:
        if not isinstance(item, Record):
            return item
        try:
            key = checked_key(item.key)
        except DecodeError:
            return pool.submit(self._judge, item, source.name)
        known = self._known.find(key)
        if known is not None and (known.source, known.place) == (source.name, item.place):
            return _Skip(key)
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
                return self._duplicate(outcome, first)
        self._known.seen_keys.add(identity)
        if isinstance(result, _Skip):
            return outcome
        known = self._known.find(result.key)
        if known is None:
            self._pending[result.key] = outcome.full_place
            return outcome
        if known.hash == _blob_hash(result) and known.caption == result.caption:
            return _Outcome(outcome.source, outcome.source_index, _Skip(result.key))
        return self._duplicate(outcome, known.full_place)

    def _duplicate(self, outcome: _Outcome, first: str) -> _Outcome:
        result = outcome.result
        assert isinstance(result, Row | _Skip)
        place = result.place if isinstance(result, Row) else outcome.full_place
        fault = Fault(
            key=result.key,
            place=place,
            reason="duplicate_key",
            detail=f"key {result.key!r} stands at {first} and at {outcome.full_place}; the first was kept",
            data=(result.blob or b"") if isinstance(result, Row) else b"",
        )
        return _Outcome(outcome.source, outcome.source_index, fault)

    def _committed_place(self, key: str) -> str | None:
        if self._newest is None:
            self._newest = self._store.refresh()
        try:
            return place_of_row(self._newest, key)
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
            content = content_id(_blob_hash(result), result.caption)
            self.tally.add_row(result, outcome.full_place, is_duplicate=content in self._known.contents)
            self._known.contents.add(content)
            writer.add(result.key, result.blob, None, **result.index_columns())


def _finish(source: Source, index: int, item: Future[Row | Fault] | Fault | Note | _Skip) -> _Outcome:
    return _Outcome(source, index, item.result() if isinstance(item, Future) else item)


def _blob_hash(row: Row) -> str | None:
    return None if row.blob is None else xxhash.xxh3_128_hexdigest(row.blob)


def _stored_faults(store: FeatureStore) -> set[tuple[str, str]]:
    table = store.quarantined()
    reasons = (reason.partition(":")[0] for reason in table.column("reason").to_pylist())
    return set(zip(table.column("place").to_pylist(), reasons))


def _check_arguments(
    optional: Sequence[str], max_bad_fraction: float, max_pixels: int, workers: int, commit_rows: int
) -> None:
    unknown = set(optional) - _OPTIONAL
    if unknown:
        raise DataError(f"optional holds {sorted(unknown)}; wanted image, caption or both")
    if not 0 <= max_bad_fraction <= 1:
        raise DataError(f"max_bad_fraction is {max_bad_fraction}, wanted a share from 0 to 1")
    for name, value in (("max_pixels", max_pixels), ("workers", workers), ("commit_rows", commit_rows)):
        if value < 1:
            raise DataError(f"{name} is {value}, wanted 1 or more")
