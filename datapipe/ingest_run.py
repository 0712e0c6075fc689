"""One pass over the sources: judge in threads, refuse what was met before, write in commits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final, Literal

import xxhash

from datapipe.errors import DecodeError
from datapipe.judge import INDEX_KINDS, Judge, Row, checked_key
from datapipe.judge_texts import TextColumns, judge_texts
from datapipe.known_rows import KnownRows, content_id, key_id, picture_id, place_of_content, place_of_row
from datapipe.open_faults import OpenFaults
from datapipe.report import Tally
from datapipe.sources import Fault, Note, Record, Source, TextRows, gathered
from storage import FeatureStore, KeyNotFoundError, PartWriter

__all__ = [
    "DuplicatePolicy",
    "IngestRun",
    "Met",
    "Outcome",
    "Resolved",
    "SourceProgress",
    "content_hash",
    "content_of",
]

DuplicatePolicy = Literal["once", "keep"]

_QUEUE_PER_WORKER: Final = 2  # pieces that wait for the writer
_BLOCK_ROWS: Final = 4096  # texts that are judged and written at once
_SMALL_BLOCK_ROWS: Final = 64  # of a block with something bad in it
_TEXT_COLUMNS: Final = frozenset({"messages", "chosen"})  # what a row says beside its caption
_PART_COLUMNS: Final = frozenset({"num_media", "media_of", "pair"})  # of samples with several media
_PIECE_RECORDS: Final = 4  # judged by one call of a thread, so that handing over costs less than judging


@dataclass(frozen=True, slots=True)
class Met:
    """Keys and contents that other runs of the same ingest take, with their places."""

    keys: Mapping[str, str] = field(default_factory=dict)
    contents: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Skip:
    """A sample that the store has already."""

    key: str
    place: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """A place whose fault in the quarantine is settled."""

    place: str


@dataclass(frozen=True, slots=True)
class _SourceEnd:
    """All outcomes of a source have come."""

    place: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one item of a source."""

    source: Source
    source_index: int
    result: Row | TextColumns | Fault | Note | _Skip | _SourceEnd | Resolved

    @property
    def full_place(self) -> str:
        return f"{self.source.base}/{self.result.place}"


@dataclass(slots=True)
class SourceProgress:
    """Of one source, as far as its outcomes were settled."""

    num_samples: int = 0
    num_bad: int = 0

    def add(self, other: SourceProgress) -> None:
        """Count in another part of the same source."""
        self.num_samples += other.num_samples
        self.num_bad += other.num_bad


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
    ) -> None:
        """Args:
        store: What is known already; None for a store that is not made yet.
        sources: Read in this order.
        judge: The rules.
        workers: Threads that read and decode.
        should_stop: Asked between samples.
        duplicates: Whether a sample that differs from another one in its key alone is left out.
        met: What other runs of the same ingest take.
        """
        self.tally = Tally()
        self.progress = [SourceProgress() for _ in sources]
        self._sources = sources
        self._judge = judge
        self._workers = workers
        self._should_stop = should_stop
        self._duplicates = duplicates
        self._known = KnownRows(store)
        self._met = met or Met()
        self._faults = OpenFaults(store)
        self._block_rows = 1  # texts that are judged at once
        self._newest = store
        self._pending: dict[str, str] = {}  # key -> place, of the rows in the open commit
        self._pending_contents: dict[int, str] = {}  # content -> place, likewise

    def examine(self, num_samples: int, update: Callable[[Tally, int], None]) -> None:
        """Count what would happen to the first num_samples samples, and write nothing."""
        for _ in self.news(update, num_samples):
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
        self._block_rows = min(_BLOCK_ROWS, commit_rows)
        news = self.news(update)
        for first in news:
            deadline = time.monotonic() + commit_s
            last = first
            tensors = self._judge.media.tensor_columns()
            with store.writer(
                message=f"ingest {first.source.name}", columns=self.column_kinds(), tensors=tensors
            ) as writer:
                count = 0
                for outcome in chain([first], news):
                    self.write(outcome, writer)
                    last = outcome
                    count += len(outcome.result) if isinstance(outcome.result, TextColumns) else 1
                    if count >= commit_rows or time.monotonic() >= deadline:
                        break
            self._pending.clear()
            self._pending_contents.clear()
            self._newest = store.refresh()
            num_commits += 1
            committed(last.source_index)
        if not self.tally.is_interrupted:
            committed(len(self._sources))
        return num_commits

    def column_kinds(self) -> dict[str, str]:
        """Types of all metadata columns."""
        return self._judge.kinds.all() | INDEX_KINDS

    def news(self, update: Callable[[Tally, int], None], num_samples: int | None = None) -> Iterator[Outcome]:
        """Outcomes that have to be written, in the order of the sources; all outcomes are counted."""
        for outcome in self._judged():
            for settled in self._settled(outcome):
                if self._count(settled):
                    yield settled
            update(self.tally, outcome.source_index)
            if num_samples is not None and self.tally.num_seen >= num_samples:
                return
            if self._should_stop():
                self.tally.is_interrupted = True
                return

    def write(self, outcome: Outcome, writer: PartWriter) -> None:
        """Add a row, or record a fault."""
        result = outcome.result
        if isinstance(result, TextColumns):
            writer.add_rows(result.keys, result.columns)
        elif isinstance(result, Resolved):
            writer.resolve(result.place)
        elif isinstance(result, Fault):
            writer.quarantine(
                key=result.key,
                place=outcome.full_place,
                reason=f"{result.reason}: {result.detail}",
                data=result.data,
            )
        elif isinstance(result, Row):
            tensors = None
            if self._judge.media.tensors:
                made = {} if result.media is None else result.media.tensors
                tensors = {rule.name: made.get(rule.name) for rule in self._judge.media.tensors}
            writer.add(result.key, result.blob, tensors, **result.index_columns())

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

    def _judged(self) -> Iterator[Outcome]:
        """Judge records in threads, a bounded number ahead, and keep the order."""
        waiting: deque[_Piece] = deque()
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="ingest")
        try:
            for index, source in enumerate(self._sources):
                for piece in self._pieces(source, index, pool):
                    waiting.append(piece)
                    if len(waiting) > self._workers * _QUEUE_PER_WORKER:
                        yield from waiting.popleft().outcomes()
            while waiting:
                yield from waiting.popleft().outcomes()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _pieces(self, source: Source, index: int, pool: ThreadPoolExecutor) -> Iterator[_Piece]:
        """Cut the items of a source into pieces: records for the threads, and what needs none."""
        batch: list[Record] = []
        for item in self._items(source):
            settled = self._without_thread(item, source)
            if settled is None and isinstance(item, Record):
                batch.append(item)
            if batch and (settled is not None or len(batch) >= _PIECE_RECORDS):
                yield _Piece(source, index, pool.submit(self._judge_all, batch, source.name))
                batch = []
            if settled is not None:
                yield _Piece(source, index, settled)
        if batch:
            yield _Piece(source, index, pool.submit(self._judge_all, batch, source.name))
        yield _Piece(source, index, [_SourceEnd()])

    def _items(self, source: Source) -> Iterator[Record | TextColumns | Fault | Note]:
        """The items of a source, texts judged by the column where all of a block are good."""
        for item in gathered(source.items()):
            if not isinstance(item, TextRows):
                yield item
                continue
            for block in item.blocks(self._block_rows):
                yield from self._texts(block, source)

    def _texts(self, rows: TextRows, source: Source) -> Iterator[Record | TextColumns]:
        judged = judge_texts(rows, source.name, self._judge) if len(rows) > 1 else None
        if judged is not None:
            yield judged
        elif len(rows) > _SMALL_BLOCK_ROWS:
            for block in rows.blocks(_SMALL_BLOCK_ROWS):
                yield from self._texts(block, source)
        else:
            yield from rows.records()

    def _without_thread(
        self, item: Record | TextColumns | Fault | Note, source: Source
    ) -> Sequence[Row | TextColumns | Fault | Note | _Skip] | None:
        if not isinstance(item, Record):
            return [item]
        try:
            key = checked_key(item.key)
        except DecodeError:
            return None
        known = self._known.find(key)
        if known is not None and (known.source, known.place) == (source.name, item.place):
            return [_Skip(key, item.place)]
        if item.load is None or (self._judge.media.trust and "://" not in source.base):
            return self._judge_all([item], source.name)  # a text or a header here is not worth a thread
        return None

    def _judge_all(self, records: Sequence[Record], source: str) -> list[Row | Fault]:
        found: list[Row | Fault] = []
        for record in records:
            judged = self._judge(record, source)
            found.extend([judged] if isinstance(judged, Fault) else judged)
        return found

    def _settled(self, outcome: Outcome) -> Iterator[Outcome]:
        """What an outcome comes to, after a look at what was met before."""
        result = outcome.result
        if isinstance(result, _SourceEnd):
            for place in self._faults.settled_by(outcome.source):
                yield replace(outcome, result=Resolved(place))
        elif isinstance(result, TextColumns):
            if self._are_new(result, outcome.source.base):
                yield outcome
                return
            for row in result.rows(outcome.source.name):
                known = self._known.find(row.key)
                is_there = known is not None and (known.source, known.place) == (row.source, row.place)
                settled = self._settle(
                    replace(outcome, result=_Skip(row.key, row.place) if is_there else row)
                )
                if settled is not None:
                    yield settled
        elif (settled := self._settle(outcome)) is not None:
            yield settled

    def _are_new(self, rows: TextColumns, base: str) -> bool:
        """Whether no key was met before; if so, all count as met now."""
        identities = set(map(key_id, rows.keys))
        if len(identities) < len(rows) or not self._known.seen_keys.isdisjoint(identities):
            return False
        if self._known.has_any(identities) or not self._met.keys.keys().isdisjoint(rows.keys):
            return False
        self._known.seen_keys |= identities
        self._pending.update(zip(rows.keys, (f"{base}/{place}" for place in rows.places)))
        return True

    def _settle(self, outcome: Outcome) -> Outcome | None:
        """Refuse a key that was met before in this run, or that the store has with another content.

        Returns:
            None for a sample that is left out because another row has the same picture, caption and columns.
        """
        result = outcome.result
        if not isinstance(result, Row | _Skip):
            return outcome
        identity = key_id(result.key)
        if result.key in self._met.keys:
            return replace(outcome, result=_duplicate(result, outcome.full_place, self._met.keys[result.key]))
        if identity in self._known.seen_keys:
            first = self._pending.get(result.key) or self._committed_place(result.key)
            if first is not None:
                return replace(outcome, result=_duplicate(result, outcome.full_place, first))
        if isinstance(result, _Skip):
            self._known.seen_keys.add(identity)
            return outcome
        known = self._known.find(result.key)
        if known is not None:
            self._known.seen_keys.add(identity)
            is_same = known.content_hash == content_hash(result) and known.caption == result.caption
            if is_same and not _TEXT_COLUMNS & result.columns.keys():
                return replace(outcome, result=_Skip(result.key, result.place))
            return replace(outcome, result=_duplicate(result, outcome.full_place, known.full_place))
        if self._is_left_out(result, outcome):
            return None
        self._known.seen_keys.add(identity)
        self._pending[result.key] = outcome.full_place
        return outcome

    def _is_left_out(self, row: Row, outcome: Outcome) -> bool:
        """Count a sample that differs from another one in its key alone; tell whether it is left out."""
        digest = content_hash(row)
        if digest is None or _PART_COLUMNS & row.columns.keys():
            return False
        content, picture = content_of(row, digest), picture_id(digest)
        if content not in self._known.contents and content not in self._met.contents:
            self.tally.num_shared_pictures += picture in self._known.pictures
            self._known.contents.add(content)
            self._known.pictures.add(picture)
            self._pending_contents[content] = outcome.full_place
            return False
        is_kept = self._duplicates == "keep"
        self.tally.add_duplicate(
            row,
            outcome.full_place,
            is_kept=is_kept,
            first_place=lambda: self._place_of_content(content, digest, row.caption),
        )
        if not is_kept:
            self.progress[outcome.source_index].num_samples += 1
        return not is_kept

    def _place_of_content(self, content: int, digest: str, caption: str | None) -> str:
        place = self._met.contents.get(content) or self._pending_contents.get(content)
        if place is None and self._newest is not None:
            place = place_of_content(self._newest, digest, caption)
        return place or "another row"

    def _committed_place(self, key: str) -> str | None:
        try:
            return None if self._newest is None else place_of_row(self._newest, key)
        except KeyNotFoundError:
            return None  # two keys of one hash


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive items of a source, judged or being judged."""

    source: Source
    source_index: int
    results: Future[list[Row | Fault]] | Sequence[Row | TextColumns | Fault | Note | _Skip | _SourceEnd]

    def outcomes(self) -> Iterator[Outcome]:
        results = self.results.result() if isinstance(self.results, Future) else self.results
        for result in results:
            yield Outcome(self.source, self.source_index, result)


def _duplicate(result: Row | _Skip, full_place: str, first: str) -> Fault:
    return Fault(
        key=result.key,
        place=result.place,
        reason="duplicate_key",
        detail=f"key {result.key!r} stands at {first} and at {full_place}; the first was kept",
        data=(result.blob or b"") if isinstance(result, Row) else b"",
    )


def content_hash(row: Row) -> str | None:
    """xxh3_128 of the file as it came; None for text."""
    if row.media is None:
        return None
    source = row.media.columns.get("source_hash")
    return str(source) if source is not None else xxhash.xxh3_128_hexdigest(row.media.blob)


def content_of(row: Row, digest: str) -> int:
    """64-bit identity of all that makes a row but its key and its place."""
    frame = None if row.media is None else row.media.columns.get("frame")
    return content_id(digest, row.caption, frame if isinstance(frame, int) else None, row.columns)
