"""Jobs run ahead, in order, bounded, and end cleanly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from datapipe.pipeline import Job, run_in_order


def slow_jobs(num: int, started: list[int]) -> Iterator[Job[int]]:
    for index in range(num):
        started.append(index)
        done: list[int] = []

        def part(index: int = index, done: list[int] = done) -> None:
            time.sleep(0.002 * (index % 3 == 0))
            done.append(index)

        yield Job(parts=[part, part], finish=lambda done=done: sum(done))  # type: ignore[misc]


@pytest.mark.parametrize(("num_threads", "depth"), [(1, 1), (1, 5), (4, 1), (4, 3), (3, 50)])
def test_results_come_in_order(num_threads: int, depth: int) -> None:
    results = list(run_in_order(slow_jobs(20, []), num_threads=num_threads, depth=depth))
    assert results == [2 * index for index in range(20)]


def test_at_most_depth_jobs_are_begun() -> None:
    started: list[int] = []
    results = run_in_order(slow_jobs(20, started), num_threads=2, depth=3)
    for index in range(5):
        next(results)
        assert len(started) <= index + 3


def test_no_jobs_and_jobs_without_parts() -> None:
    assert list(run_in_order(iter([]), num_threads=2, depth=2)) == []
    jobs: Iterator[Job[str]] = iter([Job(parts=[], finish=lambda: "a")])
    assert list(run_in_order(jobs, num_threads=2, depth=2)) == ["a"]


def test_a_stall_is_told_and_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    jobs = iter([Job(parts=[lambda: time.sleep(0.25)], finish=lambda: 1, describe=lambda: "sample x")])
    with caplog.at_level("WARNING", logger="unirl.datapipe"):
        assert list(run_in_order(jobs, num_threads=1, depth=1, stall_s=0.1)) == [1]
    assert caplog.messages[0] == "waiting for 0.1 s: sample x"


def test_a_part_may_itself_time_out() -> None:
    def part() -> None:
        raise TimeoutError("the file server")

    with pytest.raises(TimeoutError, match="the file server"):
        list(run_in_order(iter([Job(parts=[part], finish=int)]), num_threads=1, depth=1, stall_s=0.05))


def test_an_error_comes_in_its_place_and_stops_the_rest() -> None:
    ran: list[int] = []

    def part(index: int) -> Callable[[], None]:
        def run() -> None:
            if index == 2:
                raise RuntimeError("job 2")
            ran.append(index)

        return run

    def jobs() -> Iterator[Job[int]]:
        for index in range(100):
            yield Job(parts=[part(index)], finish=lambda index=index: index)  # type: ignore[misc]

    results = run_in_order(jobs(), num_threads=2, depth=4)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(RuntimeError, match="job 2"):
        next(results)
    assert max(ran) < 10
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("datapipe")]
