"""The same ingest on Ray: tasks read slices of the sources and seal parts, the driver publishes them.

Plain tasks, not Ray Data: a slice keeps its places and its order, a part lies in the store already when its
task ends, and only a short record of it comes back. A task whose process dies is run again by Ray; what it
had written is garbage that no snapshot lists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from datapipe.errors import WorkerError
from datapipe.judge import Judge
from datapipe.outcomes import Met, SourceProgress
from datapipe.ray_session import ray_session
from datapipe.ray_slices import Slice, SliceResult, cut_sources, judge_slice
from datapipe.settling import DuplicatePolicy
from datapipe.sources import Source
from datapipe.tally import Tally
from storage import FeatureStore, SealedPart

__all__ = ["RayRun"]

_MAX_DEATHS: Final = 5  # of the processes of one slice
_POLL_S: Final = 0.5  # how often a request to stop is looked for


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
        slices = cut_sources(self._sources, self._workers)
        ready: list[SealedPart] = []
        num_commits, num_waiting, deadline = 0, 0, time.monotonic() + commit_s
        with ray_session(self._workers) as ray:
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


def _fetch(ray: Any, ref: Any, source: Source) -> SliceResult:
    try:
        result: SliceResult = ray.get(ref)
    except ray.exceptions.WorkerCrashedError as error:
        raise WorkerError(
            f"{source.name}: a process that read it died {_MAX_DEATHS + 1} times; its memory may be too "
            "small (lower max_pixels), see the logs of Ray"
        ) from error
    return result
