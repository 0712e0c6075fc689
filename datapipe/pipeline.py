"""Run a pipeline: workers for each stage, results in order, bounded, watched, and ended without a rest."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from datapipe.errors import StageError
from datapipe.stage_process import StageProcess
from datapipe.stages import Pipeline, Samples, Stage

__all__ = ["StageCounters", "run_pipeline"]

_LOOK_S: Final = 0.5

logger = logging.getLogger("unirl.datapipe")

_runs: weakref.WeakSet[_Run] = weakref.WeakSet()


@atexit.register
def _stop_at_exit() -> None:
    """A thread that is in C++ code while the interpreter goes away would abort the program."""
    for run in list(_runs):
        run.stop()


@dataclass(kw_only=True, slots=True)
class StageCounters:
    """Work of one stage over all its workers, added up from run to run."""

    name: str
    concurrency: int
    num_items: int = 0  # done, failed ones included
    num_failed: int = 0
    busy_s: float = 0.0  # in the function
    idle_s: float = 0.0  # waiting for an item
    blocked_s: float = 0.0  # with a result that the next stage has no room for
    depth_sum: int = 0  # items waiting, counted whenever one is taken; over num_items it is the mean


def run_pipeline(
    pipeline: Pipeline,
    items: Iterable[tuple[object, Any]],
    *,
    counters: Iterable[StageCounters] | None = None,
) -> Iterator[Any]:
    """Yield what becomes of items, in their order, whatever the concurrency of the stages.

    At most `pipeline.capacity` items are drawn and not yet handed out: at first as many as the largest stage
    has workers, so that no later one takes time from them, then twice as many with each result. The first
    error is raised in its place in the order, and budgets are counted in that order too, so that neither
    depends on threads. When the iterator ends, fails, is closed or is dropped, waiting items are dropped,
    running ones are waited for (in processes: ended), and no worker is left. A thread that hangs longer than
    the watchdog's time cannot be ended: it is named in a warning and does not keep the program from exiting.

    Args:
        pipeline: What to run.
        items: Pairs of a key, whose text names the item in messages, and a value for the first stage. Drawn
            in the consumer's thread.
        counters: One for each stage, to be added to.

    Raises:
        StageError: When a worker exits, dies or hangs, when a budget is used up (with all failures of the
            stage), or when the iterator is used in a forked process. Other errors of a stage's function come
            as they are from threads, and as StageError from processes.
    """
    counted = (
        [StageCounters(name=stage.name, concurrency=stage.concurrency) for stage in pipeline.stages]
        if counters is None
        else list(counters)
    )
    run = _Run(pipeline, counted)
    try:
        run.start()
        yield from run.results(iter(items))
    finally:
        run.stop()


@dataclass(slots=True)
class _Task:
    number: int
    key: object
    value: Any
    error: BaseException | None = None
    failed_at: _Lane | None = None


@dataclass(slots=True)
class _Busy:
    """What a worker is at. A sample of an item has a time of its own."""

    task: _Task
    began: float
    sample_began: float


@dataclass(slots=True)
class _Lane:
    """A stage while it runs: the tasks that wait for it, and those that its workers are at."""

    stage: Stage
    counters: StageCounters
    has_work: threading.Condition
    has_room: threading.Condition
    waiting: deque[_Task] = field(default_factory=deque)
    busy: dict[str, _Busy] = field(default_factory=dict)  # by worker
    failures: list[str] = field(default_factory=list)  # what was left out, and why


class _Run:
    """All state is guarded by one lock. Whoever changes it wakes the one that waits for that and no other.

    A thread that wakes in vain takes the interpreter from one that works.
    """

    def __init__(self, pipeline: Pipeline, counters: list[StageCounters]) -> None:
        self._pipeline = pipeline
        self._lock = threading.Lock()
        self._lanes = [
            _Lane(stage, counted, threading.Condition(self._lock), threading.Condition(self._lock))
            for stage, counted in zip(pipeline.stages, counters, strict=True)
        ]
        self._done: dict[int, _Task] = {}
        self._wanted = 0  # the task that the consumer waits for, or will next
        self._is_done = threading.Condition(self._lock)
        self._is_stopped = self._has_ended = False
        self._pid = os.getpid()
        self._threads: list[threading.Thread] = []
        self._processes: list[StageProcess] = []

    def start(self) -> None:
        _runs.add(self)
        for place, lane in enumerate(self._lanes):
            for number in range(lane.stage.concurrency):
                process = StageProcess(lane.stage) if lane.stage.executor == "process" else None
                if process is not None:
                    self._processes.append(process)
                thread = threading.Thread(
                    target=self._work,
                    args=(place, process),
                    name=f"datapipe-{lane.stage.name}-{number}",
                    daemon=True,
                )
                self._threads.append(thread)
                thread.start()

    def stop(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        if os.getpid() != self._pid:
            return  # the workers are the parent's
        _runs.discard(self)
        with self._lock:
            self._is_stopped = True
            for lane in self._lanes:
                lane.has_work.notify_all()
                lane.has_room.notify_all()
        for process in self._processes:
            process.close()
        if threading.current_thread() in self._threads:
            return  # the garbage collector dropped the iterator in a worker
        ends_at = time.monotonic() + self._pipeline.watchdog_s
        for thread in self._threads:
            if not any(self._is_overdue(lane, thread.name) for lane in self._lanes):
                thread.join(max(0.0, ends_at - time.monotonic()))
            if thread.is_alive():
                logger.warning("a thread is left behind: %s", self._at_work(thread.name))

    def results(self, items: Iterator[tuple[object, Any]]) -> Iterator[Any]:
        drawn = handed_out = 0
        is_open = True
        capacity = self._pipeline.capacity
        ahead = min(capacity, max(stage.concurrency for stage in self._pipeline.stages))
        while True:
            while is_open and drawn - handed_out < ahead:
                pair = next(items, None)
                if pair is None:
                    is_open = False
                else:
                    self._admit(_Task(drawn, *pair))
                    drawn += 1
            if handed_out == drawn:
                return
            task = self._await(handed_out)
            handed_out += 1
            ahead = min(capacity, 2 * ahead)
            if task.failed_at is None:
                yield task.value
            else:
                self._settle_failure(task.failed_at, task)

    def _admit(self, task: _Task) -> None:
        with self._lock:
            self._lanes[0].waiting.append(task)
            self._lanes[0].has_work.notify()

    def _await(self, number: int) -> _Task:
        if os.getpid() != self._pid:
            raise StageError(
                f"the iterator was begun in process {self._pid} and is used in {os.getpid()}, which has none "
                f"of its workers; begin to iterate after the fork"
            )
        began = warned = time.monotonic()
        with self._lock:
            self._wanted = number
            while number not in self._done:
                self._is_done.wait(min(_LOOK_S, self._pipeline.watchdog_s))
                now = time.monotonic()
                for process in self._processes:
                    process.end_if_overdue()
                self._raise_overdue()
                if now - warned >= self._pipeline.watchdog_s and number not in self._done:
                    warned = now
                    logger.warning("waiting for %.3g s: %s", now - began, self._whereabouts(number))
            return self._done.pop(number)

    def _work(self, place: int, process: StageProcess | None) -> None:
        lane, worker = self._lanes[place], threading.current_thread().name
        while (task := self._take(lane, worker)) is not None:
            at: int | None = place
            while at is not None:
                self._do(self._lanes[at], worker, process if at == place else None, task)
                at = self._pass_on(at, worker, task)
            del task  # an idle worker keeps no item alive

    def _do(self, lane: _Lane, worker: str, process: StageProcess | None, task: _Task) -> None:
        samples, function = lane.stage.samples, lane.stage.function
        try:
            if samples is not None:
                self._each_sample(samples, process or function, task.value, lane.busy[worker])
            elif process is not None:
                task.value = process(str(task.key), task.value)
            else:
                task.value = function(task.value)
        except BaseException as error:  # raised again by the consumer
            task.error = error

    def _each_sample(self, samples: Samples, call: Callable[..., Any], item: Any, busy: _Busy) -> None:
        is_sent = isinstance(call, StageProcess)
        for index in samples.indices(item):
            if self._is_stopped:
                return
            busy.sample_began = time.monotonic()
            try:
                sample = samples.take(item, index)
                result = call(str(samples.key(item, index)), sample) if is_sent else call(sample)
                samples.put(item, index, result)
            except Exception as error:  # whoever made the items counts it
                samples.drop(item, index, error)

    def _take(self, lane: _Lane, worker: str) -> _Task | None:
        began = time.monotonic()
        with self._lock:
            while not lane.waiting and not self._is_stopped:
                lane.has_work.wait()
            if self._is_stopped:
                return None
            now = time.monotonic()
            lane.counters.idle_s += now - began
            lane.counters.depth_sum += len(lane.waiting)
            task = lane.waiting.popleft()
            lane.busy[worker] = _Busy(task, now, now)
            lane.has_room.notify()
            return task

    def _pass_on(self, place: int, worker: str, task: _Task) -> int | None:
        """Hand a task on; the place of the stage that its worker goes on with, None where there is none."""
        lane = self._lanes[place]
        following = self._lanes[place + 1] if place + 1 < len(self._lanes) else None
        with self._lock:
            began = lane.busy.pop(worker).began
            now = time.monotonic()
            lane.counters.busy_s += now - began
            lane.counters.num_items += 1
            if task.error is not None:
                task.failed_at, following = lane, None
            if following is None:
                self._done[task.number] = task
                if task.number == self._wanted:
                    self._is_done.notify()
            elif following.stage.concurrency == 0:
                following.busy[worker] = _Busy(task, now, now)
                return place + 1
            else:
                while len(following.waiting) >= following.stage.queue_size and not self._is_stopped:
                    following.has_room.wait()
                lane.counters.blocked_s += time.monotonic() - now
                following.waiting.append(task)
                following.has_work.notify()
        return None

    def _settle_failure(self, lane: _Lane, task: _Task) -> None:
        """Leave a failed item out, or raise what it failed with."""
        error, stage = task.error, lane.stage
        place = f"stage {stage.name!r}, sample '{task.key}'"
        if not isinstance(error, Exception):
            raise StageError(
                f"{place}: the function ended with {error!r}; it must return or raise"
            ) from error
        lane.failures.append(f"sample '{task.key}': {error}")
        lane.counters.num_failed += 1
        if len(lane.failures) <= stage.max_failures:
            logger.warning(
                "%s is left out, failure %d of %d allowed: %s",
                place,
                len(lane.failures),
                stage.max_failures,
                error,
            )
        elif stage.max_failures:
            raise StageError(
                f"stage {stage.name!r}: {len(lane.failures)} samples failed, {stage.max_failures} may: "
                + "; ".join(lane.failures)
            ) from error
        else:
            if not isinstance(error, StageError):
                error.add_note(place)
            raise error

    def _is_overdue(self, lane: _Lane, worker: str) -> bool:
        limit, at = lane.stage.timeout_s, lane.busy.get(worker)
        return limit is not None and at is not None and time.monotonic() - at.sample_began > limit

    def _raise_overdue(self) -> None:
        for lane in self._lanes:
            for worker in lane.busy:
                if lane.stage.executor == "thread" and self._is_overdue(lane, worker):
                    raise StageError(
                        f"{self._at_work(worker)}, timeout_s is {lane.stage.timeout_s:g}; a thread "
                        f"cannot be ended: use executor='process' where items may hang, or allow more time"
                    )

    def _whereabouts(self, number: int) -> str:
        for lane in self._lanes:
            for worker, busy in lane.busy.items():
                if busy.task.number == number:
                    return self._at_work(worker)
        others = [self._at_work(worker) for lane in self._lanes for worker in lane.busy]
        return "; ".join(others) or "nothing is at work"

    def _at_work(self, worker: str) -> str:
        for lane in self._lanes:
            at = lane.busy.get(worker)
            if at is not None:
                return (
                    f"stage {lane.stage.name!r}, worker {worker} is at sample '{at.task.key}' for "
                    f"{time.monotonic() - at.sample_began:.3g} s"
                )
        return f"worker {worker} is idle"
