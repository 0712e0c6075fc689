"""Read sources and judge what is in them: pictures in threads, texts by the column, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from datapipe.errors import DecodeError
from datapipe.judge import Judge, Row, checked_key
from datapipe.judge_texts import TextColumns, judge_texts
from datapipe.known_rows import KnownRows
from datapipe.outcomes import Judged, Outcome, Skip, SourceEnd
from datapipe.sources import Fault, Note, Record, Source, TextRows, gathered

__all__ = ["JudgedSources"]

_QUEUE_PER_WORKER: Final = 2  # pieces that wait for the writer
_SMALL_BLOCK_ROWS: Final = 64  # of a block with something bad in it
_PIECE_BYTES: Final = 1 << 19  # judged by one call of a thread, so that handing over costs less than judging
_MAX_PIECE_RECORDS: Final = 16


class JudgedSources:
    """Judges every item of some sources, whatever else the run has met."""

    def __init__(
        self, sources: Sequence[Source], judge: Judge, known: KnownRows, *, workers: int, block_rows: int
    ) -> None:
        """Args:
        sources: Read in this order.
        judge: The rules.
        known: Rows that are not judged again when they come from the same place.
        workers: Threads that read and decode.
        block_rows: Texts that are judged at once, at most.
        """
        self._sources = sources
        self._judge = judge
        self._known = known
        self._workers = workers
        self._block_rows = block_rows
        self._piece_records = 1  # as many as _PIECE_BYTES hold, by what came last

    def outcomes(self) -> Iterator[Outcome]:
        """Judge records in threads, a bounded number ahead, and keep the order."""
        waiting: deque[_Piece] = deque()
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="ingest")
        try:
            for index, source in enumerate(self._sources):
                for piece in self._pieces(source, index, pool):
                    waiting.append(piece)
                    if len(waiting) > self._workers * _QUEUE_PER_WORKER:
                        yield from self._outcomes_of(waiting.popleft())
            while waiting:
                yield from self._outcomes_of(waiting.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _outcomes_of(self, piece: _Piece) -> Iterator[Outcome]:
        judged = piece.judged()
        if num_bytes := sum(len(each.blob or b"") for each in judged if isinstance(each, Row)):
            fitting = _PIECE_BYTES * len(judged) // num_bytes
            self._piece_records = min(max(1, fitting), _MAX_PIECE_RECORDS)
        for each in judged:
            yield Outcome(piece.source, piece.source_index, each)

    def _pieces(self, source: Source, index: int, pool: ThreadPoolExecutor) -> Iterator[_Piece]:
        """Cut the items of a source into pieces: records for the threads, and what needs none."""
        batch: list[Record] = []
        for item in self._items(source):
            settled = self._without_thread(item, source)
            if settled is None and isinstance(item, Record):
                batch.append(item)
            if batch and (settled is not None or len(batch) >= self._piece_records):
                yield _Piece(source, index, pool.submit(self._judge_all, batch, source.name))
                batch = []
            if settled is not None:
                yield _Piece(source, index, settled)
        if batch:
            yield _Piece(source, index, pool.submit(self._judge_all, batch, source.name))
        yield _Piece(source, index, [SourceEnd()])

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
    ) -> Sequence[Judged] | None:
        if not isinstance(item, Record):
            return [item]
        try:
            key = checked_key(item.key)
        except DecodeError:
            return None
        known = self._known.find(key)
        if known is not None and (known.source, known.place) == (source.name, item.place):
            return [Skip(key, item.place)]
        if item.load is None or (self._judge.media.trust and "://" not in source.base):
            return self._judge_all([item], source.name)  # a text or a header here is not worth a thread
        return None

    def _judge_all(self, records: Sequence[Record], source: str) -> list[Row | Fault]:
        found: list[Row | Fault] = []
        for record in records:
            judged = self._judge(record, source)
            found.extend([judged] if isinstance(judged, Fault) else judged)
        return found


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive items of a source, judged or being judged."""

    source: Source
    source_index: int
    results: Future[list[Row | Fault]] | Sequence[Judged]

    def judged(self) -> Sequence[Judged]:
        """Wait for the results."""
        return self.results.result() if isinstance(self.results, Future) else self.results
