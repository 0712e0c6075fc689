"""The same ingest on Ray Data: tasks read slices of the sources and seal parts, the driver publishes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from datapipe.identity_set import IdentitySet
from datapipe.judge import Judge
from datapipe.outcomes import Met, SourceProgress
from datapipe.ray_plan import RayPlan, RunFolder
from datapipe.ray_receipt import SliceReceipt
from datapipe.ray_session import ray_session
from datapipe.ray_slices import Slice, SliceRules, cut_sources
from datapipe.settling import DuplicatePolicy
from datapipe.sources import Source
from datapipe.tally import Tally
from storage import FeatureStore, SealedPart

__all__ = ["RayRun"]


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
        self._settled = _SettledRows()

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

        A request to stop ends the last commit with the first slice that was not read to its end, so that the
        store has what comes before some sample, and nothing behind it.

        Args:
            store: What is written to; every process must reach it under the same path.
            update: Told of every slice.
            commit_rows: A commit ends with the slice that makes it so many samples,
            commit_s: or with the first slice after so many seconds.
            committed: Told after each commit how many sources are in the store to their end.
        """
        slices = cut_sources(self._sources, self._workers)
        if not slices:
            return 0
        rules = SliceRules(
            store_path=store.path,
            first_row=store.snapshot.next_row,
            judge=self._judge,
            duplicates=self._duplicates,
        )
        num_commits, num_waiting, deadline = 0, 0, time.monotonic() + commit_s
        num_settled = 0
        with ray_session(self._workers) as ray, RunFolder(store.path) as folder:
            plan = RayPlan(
                ray,
                self._sources,
                slices,
                rules,
                folder=folder,
                workers=self._workers,
                should_stop=self._should_stop,
            )
            try:
                for receipt in self._in_order(plan, len(slices)):
                    part = slices[receipt.slice_number]
                    self._settle(part, receipt)
                    update(self.tally, part.source_index)
                    if self.tally.is_interrupted:
                        break
                    num_settled += 1
                    num_waiting += receipt.tally.num_seen
                    if num_waiting >= commit_rows or time.monotonic() >= deadline:
                        num_commits += self._publish(store)
                        num_waiting, deadline = 0, time.monotonic() + commit_s
                        committed(part.source_index + (part.stop is None))
            finally:
                plan.close()
        num_commits += self._publish(store)
        self.tally.is_interrupted = num_settled < len(slices)
        if not self.tally.is_interrupted:
            committed(len(self._sources))
        return num_commits

    def _publish(self, store: FeatureStore) -> int:
        ready = self._settled.take_parts()
        before = store.refresh().snapshot.id
        names = self._sources[0].name if len(self._sources) == 1 else f"{len(self._sources)} sources"
        return int(store.publish_parts(ready, message=f"ingest {names}").id != before) if ready else 0

    def _in_order(self, plan: RayPlan, num_slices: int) -> Iterator[SliceReceipt]:
        """Receipts by slice number, once no earlier slice has any of their keys or contents."""
        done: dict[int, SliceReceipt] = {}
        met: dict[int, Met] = {}
        wanted = 0
        for receipt in plan.receipts(range(num_slices), met):
            done[receipt.slice_number] = receipt
            while wanted in done:
                if self._settled.shared(done[wanted]) is not None:
                    self._make_again(plan, done, met)
                if wanted not in done:
                    return  # a task did not answer a request to stop
                yield done.pop(wanted)
                wanted += 1

    def _make_again(self, plan: RayPlan, done: dict[int, SliceReceipt], met: dict[int, Met]) -> None:
        """Make every slice again, without them, that has keys or contents of those that are settled."""
        again = []
        for number, receipt in sorted(done.items()):
            shared = self._settled.shared(receipt)
            if shared is not None:
                before = met.get(number, Met())
                met[number] = Met({**before.keys, **shared.keys}, {**before.contents, **shared.contents})
                again.append(number)
        for number in again:
            del done[number]
        for receipt in plan.receipts(again, {number: met[number] for number in again}):
            done[receipt.slice_number] = receipt

    def _settle(self, part: Slice, receipt: SliceReceipt) -> None:
        self._settled.add(receipt)
        self.tally.merge(receipt.tally)
        self.progress[part.source_index].add(receipt.progress)


class _SettledRows:
    """Keys and contents of the slices that are settled: 16 bytes a row, and more only until publication."""

    def __init__(self) -> None:
        self._keys = IdentitySet()
        self._contents = IdentitySet()
        self._unpublished: list[SliceReceipt] = []

    def add(self, receipt: SliceReceipt) -> None:
        """Take in a slice that has nothing of the others."""
        self._keys.add_new(receipt.key_ids.tolist())
        self._contents.add_new(receipt.contents[receipt.contents != 0].tolist())
        self._unpublished.append(receipt)

    def take_parts(self) -> list[SealedPart]:
        """The parts that are to be published now. From then on tasks find their rows in the store."""
        parts = [receipt.sealed for receipt in self._unpublished if receipt.sealed is not None]
        self._unpublished = []
        return parts

    def shared(self, receipt: SliceReceipt) -> Met | None:
        """What a slice has that a settled one has too, with the places of rows that no task can find yet.

        Returns:
            None when there is nothing.
        """
        key_ids = self._keys.members(receipt.key_ids)
        contents = self._contents.members(receipt.contents)
        if not len(key_ids) and not len(contents):
            return None
        met = Met({}, {})
        for earlier in self._unpublished:
            for at in _positions(earlier.key_ids, key_ids):
                met.keys[earlier.keys[at].as_py()] = earlier.places[at].as_py()
            for at in _positions(earlier.contents, contents):
                met.contents[int(earlier.contents[at])] = earlier.places[at].as_py()
        return met


def _positions(ids: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> list[int]:
    found: list[int] = np.flatnonzero(np.isin(ids, wanted)).tolist()
    return found
