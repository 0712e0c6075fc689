"""Run jobs ahead of the consumer, in threads, and hand their results out in order."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

__all__ = ["STALL_S", "Job", "run_in_order"]

STALL_S: Final = 60.0

logger = logging.getLogger("unirl.datapipe")

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(Generic[Result]):
    """One result, made by parts that may run side by side in any order."""

    parts: Sequence[Callable[[], None]]
    finish: Callable[[], Result]  # called by the consumer when every part is done; wants to be cheap
    describe: Callable[[], str] = lambda: "a job"  # what it is busy with, for the warning of a stall


def run_in_order(
    jobs: Iterator[Job[Result]], *, num_threads: int, depth: int, stall_s: float = STALL_S
) -> Iterator[Result]:
    """Yield the results of jobs in their order, with at most `depth` jobs begun and not yet handed out.

    Memory is bounded by `depth` results. The first error of a part is raised in its place in the order.
    When the iterator ends, fails, is closed or is dropped, waiting parts are cancelled, running ones are
    waited for, and no thread is left.

    Args:
        jobs: Drawn one by one, in the consumer's thread.
        num_threads: 1 or more.
        depth: 1 or more.
        stall_s: Seconds without the next result after which a warning names what is waited for; it comes
            again after each further span of this length.
    """
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="datapipe")
    begun: deque[tuple[Job[Result], list[Future[None]]]] = deque()
    try:
        is_open = True
        while True:
            while is_open and len(begun) < depth:
                job = next(jobs, None)
                if job is None:
                    is_open = False
                else:
                    begun.append((job, [pool.submit(part) for part in job.parts]))
            if not begun:
                return
            job, futures = begun.popleft()
            for future in futures:
                _await(future, job, stall_s)
            yield job.finish()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _await(future: Future[None], job: Job[Any], stall_s: float) -> None:
    waited_s = 0.0
    while not wait([future], timeout=stall_s).done:
        waited_s += stall_s
        logger.warning("waiting for %.3g s: %s", waited_s, job.describe())
    future.result()
