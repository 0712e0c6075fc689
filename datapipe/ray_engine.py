"""The same ingest on Ray: tasks read slices of the sources and seal parts, the driver publishes them.

Plain tasks, not Ray Data: a slice keeps its places and its order, a part lies in the store already when its
task ends, and only a short record of it comes back. A task whose process dies is run again by Ray; what it
had written is garbage that no snapshot lists.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from datapipe.errors import MissingExtraError, WorkerError
from datapipe.ingest_run import (
    DuplicatePolicy,
    IngestRun,
    Met,
    Outcome,
    Resolved,
    SourceProgress,
    content_hash,
    content_of,
)
from datapipe.judge import Judge, Row
from datapipe.judge_texts import TextColumns
from datapipe.known_rows import key_id
from datapipe.report import Tally
from datapipe.sources import Item, Source
from datapipe.sources.column_kinds import ColumnKinds
from datapipe.sources.text_rows import one_by_one
from storage import DuplicateKeyError, FeatureStore, SealedPart

__all__ = ["RayRun"]

_SLICES_PER_WORKER: Final = 2  # of one source, when there are fewer sources than that
_MAX_DEATHS: Final = 5  # of the processes of one slice
_MAX_RACES: Final = 5  # commits of others that a slice gives way to
_POLL_S: Final = 0.5  # how often a request to stop is looked for


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
            digest = content_hash(result)
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
                for outcome in run.news(lambda tally, num_finished: None):
                    if isinstance(outcome.result, Resolved) and not part.is_whole:
                        continue  # another slice may have met the fault again
                    run.write(outcome, writer)
                    rows.add(outcome)
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


class RayRun:
    """Stands in for IngestRun: the same tally, progress and commits."""

    def __init__(
        self,
        sources: Sequence[Source],
        judge: Judge,
        *,
        workers: int,
        should_stop: Callable[[], bool],
        duplicates: DuplicatePolicy,
    ) -> None:
        """Args:
        sources: Read in this order.
        judge: The rules.
        workers: Tasks at a time.
        should_stop: Asked while tasks run.
        duplicates: Whether a sample that differs from another one in its key alone is left out.
        """
        self.tally = Tally()
        self.progress = [SourceProgress() for _ in sources]
        self._sources = sources
        self._judge = judge
        self._workers = workers
        self._should_stop = should_stop
        self._duplicates: DuplicatePolicy = duplicates
        self._settled: list[SliceResult] = []
        self._met: dict[int, Met] = {}  # slice -> what earlier slices turned out to have

    def commit_all(
        self,
        store: FeatureStore,
        update: Callable[[Tally, int], None],
        *,
        commit_rows: int,
        commit_s: float,
        committed: Callable[[int], None] = lambda num_finished: None,
    ) -> int:
        """Write everything in commits of whole slices, in the order of the sources; return how many.

        Args:
            store: What is written to; every process must reach it under the same path.
            update: Told of every slice.
            commit_rows: A commit ends with the slice that makes it so many samples,
            commit_s: or with the first slice after so many seconds.
            committed: Told after each commit how many sources are in the store to their end.
        """
        slices = _cut(self._sources, self._workers)
        ready: list[SealedPart] = []
        num_commits, num_waiting, deadline = 0, 0, time.monotonic() + commit_s
        with _ray(self._workers) as ray:
            for index, result in self._in_order(ray, store.path, slices):
                self._settle(slices[index], result)
                update(self.tally, slices[index].source_index)
                ready.append(result.sealed)
                num_waiting += result.tally.num_seen
                if num_waiting >= commit_rows or time.monotonic() >= deadline:
                    num_commits += self._publish(store, ready)
                    ready, num_waiting, deadline = [], 0, time.monotonic() + commit_s
                    is_last = slices[index].stop is None
                    committed(slices[index].source_index + is_last)
        num_commits += self._publish(store, ready)
        if not self.tally.is_interrupted:
            committed(len(self._sources))
        return num_commits

    def _publish(self, store: FeatureStore, ready: Sequence[SealedPart]) -> int:
        before = store.refresh().snapshot.id
        names = self._sources[0].name if len(self._sources) == 1 else f"{len(self._sources)} sources"
        return int(store.publish_parts(ready, message=f"ingest {names}").id != before) if ready else 0

    def _in_order(self, ray: Any, path: Path, slices: Sequence[Slice]) -> Iterator[tuple[int, SliceResult]]:
        """Results by slice number, once no earlier slice has any of their keys or contents."""
        task = ray.remote(max_retries=_MAX_DEATHS)(judge_slice)
        sources = [ray.put(source) for source in self._sources]
        judge = ray.put(self._judge)
        running: dict[Any, int] = {}
        done: dict[int, SliceResult] = {}
        unsent, wanted = iter(range(len(slices))), 0

        def send(number: int) -> None:
            part = slices[number]
            met = self._met.get(number, Met())
            ref = task.remote(path, sources[part.source_index], part, judge, self._duplicates, met)
            running[ref] = number

        for number in islice(unsent, self._workers):
            send(number)
        while running:
            if self._should_stop():
                self.tally.is_interrupted = True
                for ref in running:
                    ray.cancel(ref, force=True)
                return
            for ref in ray.wait(list(running), timeout=_POLL_S)[0]:
                number = running.pop(ref)
                done[number] = _fetch(ray, ref, self._sources[slices[number].source_index])
                for following in islice(unsent, 1):
                    send(following)
            while wanted in done:
                result = done.pop(wanted)
                if self._has_met(wanted, result):
                    send(wanted)
                    break
                yield wanted, result
                wanted += 1

    def _has_met(self, number: int, result: SliceResult) -> bool:
        """Whether an earlier slice has a key or a content of this one, which then is made again without."""
        keys, contents = {}, {}
        for earlier in self._settled:
            for shared in np.intersect1d(earlier.key_ids, result.key_ids).tolist():
                at = int(np.flatnonzero(earlier.key_ids == shared)[0])
                keys[earlier.keys[at].as_py()] = earlier.places[at].as_py()
            for shared in np.intersect1d(earlier.contents, result.contents).tolist():
                if shared and self._duplicates == "once":
                    at = int(np.flatnonzero(earlier.contents == shared)[0])
                    contents[shared] = earlier.places[at].as_py()
        if not keys and not contents:
            return False
        before = self._met.get(number, Met())
        self._met[number] = Met({**before.keys, **keys}, {**before.contents, **contents})
        return True

    def _settle(self, part: Slice, result: SliceResult) -> None:
        self._settled.append(result)
        self.tally.merge(result.tally)
        self.progress[part.source_index].add(result.progress)


def _cut(sources: Sequence[Source], workers: int) -> list[Slice]:
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


def _fetch(ray: Any, ref: Any, source: Source) -> SliceResult:
    try:
        result: SliceResult = ray.get(ref)
    except ray.exceptions.WorkerCrashedError as error:
        raise WorkerError(
            f"{source.name}: a process that read it died {_MAX_DEATHS + 1} times; its memory may be too "
            "small (lower max_pixels), see the logs of Ray"
        ) from error
    return result


@contextmanager
def _ray(workers: int) -> Iterator[Any]:
    """Ray as it runs already, else on the cluster of RAY_ADDRESS, else on this machine for this block."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            "engine='ray' needs Ray, which is not installed; install the extra with "
            "`pip install 'unirl[ray]'`"
        ) from error
    if ray.is_initialized():
        yield ray
        return
    here: Mapping[str, Any] = {
        "num_cpus": workers,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }
    before = signal.getsignal(signal.SIGTERM)
    ray.init(
        logging_level=logging.ERROR, log_to_driver=False, **({} if os.environ.get("RAY_ADDRESS") else here)
    )
    _restore(before)
    try:
        yield ray
    finally:
        ray.shutdown()
        _restore(before)


def _restore(handler: Any) -> None:
    """Set the handler again that Ray replaces by one that ends the process; the caller's commits first."""
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
