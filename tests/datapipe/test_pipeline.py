"""Stages run ahead, in order, bounded, watched, and end cleanly."""

from __future__ import annotations

import functools
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from datapipe.errors import StageError
from datapipe.pipeline import StageCounters, run_pipeline
from datapipe.stage_process import StageProcess
from datapipe.stages import Pipeline, Stage
from tests.datapipe import stage_functions

ROOT = Path(__file__).parents[2]


def numbers(count: int, drawn: list[int] | None = None) -> Iterator[tuple[str, int]]:
    for index in range(count):
        if drawn is not None:
            drawn.append(index)
        yield f"n{index}", index


def one_stage(function: Callable[[Any], Any], **options: Any) -> Pipeline:
    return Pipeline(stages=(Stage(name="work", function=function, **options),))


def no_worker_is_left() -> bool:
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("datapipe")]
    return not names and not multiprocessing.active_children()


def uneven(value: int) -> int:
    time.sleep(0.002 * (value % 3 == 0))
    return value + 1


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("queue_size", [1, 4])
def test_results_come_in_order(concurrency: int, queue_size: int) -> None:
    options = {"concurrency": concurrency, "queue_size": queue_size}
    stages = [Stage(name=name, function=uneven, **options) for name in "abc"]  # type: ignore[arg-type]
    assert list(run_pipeline(Pipeline(stages=tuple(stages)), numbers(30))) == list(range(3, 33))
    assert no_worker_is_left()


def test_a_stage_without_workers_is_done_by_those_of_the_stage_before() -> None:
    workers: set[str] = set()

    def fail_at_four(value: int) -> int:
        workers.add(threading.current_thread().name)
        if value == 4:
            raise ValueError("four is bad")
        return 10 * value

    follow = Stage(name="follow", function=fail_at_four, concurrency=0, max_failures=1)
    pipeline = Pipeline(
        stages=(
            Stage(name="work", function=uneven, concurrency=2),
            follow,
            Stage(name="last", function=uneven),
        )
    )
    assert str(follow).endswith(", in the worker of the stage before, 1 failures allowed")
    assert pipeline.capacity == 2 + 2 + 1 + 2
    counters = [StageCounters(name=stage.name, concurrency=stage.concurrency) for stage in pipeline.stages]
    wanted = [10 * value + 1 for value in range(1, 31) if value != 4]
    assert list(run_pipeline(pipeline, numbers(30), counters=counters)) == wanted
    assert workers <= {"datapipe-work-0", "datapipe-work-1"}
    assert [(counted.num_items, counted.num_failed) for counted in counters] == [(30, 0), (30, 1), (29, 0)]
    assert no_worker_is_left()


def test_a_stage_without_workers_is_named_when_it_hangs() -> None:
    gate = threading.Event()
    hanging = Stage(name="follow", function=lambda value: gate.wait(60), concurrency=0, timeout_s=0.3)
    pipeline = Pipeline(stages=(Stage(name="work", function=uneven), hanging))
    with pytest.raises(StageError, match="stage 'follow', worker datapipe-work-0 is at sample 'n0' for"):
        list(run_pipeline(pipeline, numbers(3)))
    gate.set()


def test_what_is_in_flight_is_bounded() -> None:
    drawn: list[int] = []
    pipeline = Pipeline(stages=(Stage(name="a", function=uneven, concurrency=2),), max_in_flight=3)
    results = run_pipeline(pipeline, numbers(20, drawn))
    for index in range(5):
        next(results)
        assert len(drawn) <= index + 3


def test_a_slow_stage_holds_back_the_ones_before_it() -> None:
    gate, reached = threading.Event(), []

    def slow(value: int) -> int:
        gate.wait(10)
        return value

    def early(value: int) -> int:
        reached.append(value)
        return value

    stages = (Stage(name="early", function=early), Stage(name="slow", function=slow, queue_size=1))
    results = run_pipeline(Pipeline(stages=stages, max_in_flight=20), numbers(20))
    opener = threading.Timer(0.2, lambda: (reached.append(-1), gate.set()))
    opener.start()
    assert list(results) == list(range(20))
    assert reached.index(-1) <= 3  # one at work, one waiting, one that found no room


def test_no_items() -> None:
    assert list(run_pipeline(one_stage(uneven), numbers(0))) == []


def test_a_pipeline_is_printable() -> None:
    decode = Stage(
        name="decode", function=functools.partial(stage_functions.double), concurrency=2, timeout_s=5
    )
    other = Stage(name="score", function=stage_functions.double, executor="process", max_failures=3)
    assert str(Pipeline(stages=(decode, other))).splitlines() == [
        "decode: tests.datapipe.stage_functions.double, 2 threads, queue of 2, 0 failures allowed, "
        "5 s an item at most",
        "score: tests.datapipe.stage_functions.double, 1 process, queue of 2, 3 failures allowed",
        "at most 7 items in flight",
    ]


def test_a_stall_is_told_and_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(name="decode", function=lambda value: time.sleep(0.25))
    with caplog.at_level("WARNING", logger="unirl.datapipe"):
        assert list(run_pipeline(Pipeline(stages=(stage,), watchdog_s=0.1), [("x", 1)])) == [None]
    assert caplog.messages[0].startswith("waiting for 0.1")
    assert "stage 'decode', worker datapipe-decode-0 is at sample 'x' for 0." in caplog.messages[0]


def test_an_error_comes_in_its_place_and_stops_the_rest() -> None:
    ran: list[int] = []

    def part(value: int) -> int:
        if value == 2:
            raise TimeoutError("the file server")
        ran.append(value)
        return value

    results = run_pipeline(one_stage(part, concurrency=2), numbers(100))
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(TimeoutError, match="the file server") as caught:
        next(results)
    assert caught.value.__notes__ == ["stage 'work', sample 'n2'"]
    assert max(ran) < 10
    assert no_worker_is_left()


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_failures_within_the_budget_are_left_out(executor: Any, caplog: pytest.LogCaptureFixture) -> None:
    options = {"executor": executor, "max_failures": 1}
    pipeline = one_stage(stage_functions.fail_at_three, **options)
    counters = [StageCounters(name="work", concurrency=1)]
    assert list(run_pipeline(pipeline, numbers(5), counters=counters)) == [0, 1, 2, 4]
    assert (counters[0].num_items, counters[0].num_failed) == (5, 1)
    assert "sample 'n3' is left out, failure 1 of 1 allowed" in caplog.text
    twice = [("a", 3), ("b", 3), ("c", 1)]
    with pytest.raises(ValueError, match="three is bad"):
        list(run_pipeline(pipeline, twice))


def test_a_function_that_exits_is_an_error_and_not_the_end_of_the_program() -> None:
    with pytest.raises(StageError, match=r"stage 'work', sample 'n3': .* ended with SystemExit\(4\)"):
        list(run_pipeline(one_stage(stage_functions.exit_at_three), numbers(5)))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (stage_functions.fail_at_three, "sample 'n3': ValueError: three is bad"),
        (stage_functions.kill_at_three, r"sample 'n3': process \d+ was killed by SIGKILL"),
        (stage_functions.exit_at_three, r"sample 'n3': process \d+ exited with code 4"),
        (
            stage_functions.hang_at_three,
            r"sample 'n3': process \d+ was ended, it took longer than timeout_s=4",
        ),
        (stage_functions.unsendable, "sample 'n0': the result cannot be sent back"),
    ],
)
def test_what_goes_wrong_in_a_process_is_told(function: Callable[[int], object], message: str) -> None:
    pipeline = one_stage(function, executor="process", timeout_s=4)
    with pytest.raises(StageError, match=message):
        list(run_pipeline(pipeline, numbers(5)))
    assert no_worker_is_left()


def test_too_few_open_files_for_a_process_are_told() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), limits[1]))  # noqa: PTH208
    try:
        with pytest.raises(StageError, match=r"could be started: Too many open files; .*ulimit -n"):
            list(run_pipeline(one_stage(str, executor="process"), numbers(3)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert no_worker_is_left()


def test_a_dead_process_is_replaced_within_the_budget() -> None:
    pipeline = one_stage(stage_functions.kill_at_three, executor="process", max_failures=1)
    assert list(run_pipeline(pipeline, numbers(6))) == [0, 1, 2, 4, 5]
    assert no_worker_is_left()


def test_a_stopped_process_that_takes_no_item_is_ended_in_time() -> None:
    """Sending an item larger than the pipe waits for the process, before any answer is waited for."""
    pids: list[int] = []

    def items() -> Iterator[tuple[str, bytes]]:
        yield "first", b""
        os.kill(pids[0], signal.SIGSTOP)
        yield "large", bytes(8 << 20)
        yield "last", b""

    work = Stage(
        name="work",
        function=stage_functions.pid_of_process,
        executor="process",
        timeout_s=1,
        max_failures=1,
    )
    for pid in run_pipeline(Pipeline(stages=(work,), max_in_flight=1), items()):
        pids.append(pid)
    assert len(set(pids)) == len(pids) == 2
    assert no_worker_is_left()


def test_a_process_that_dies_in_the_middle_of_a_result_costs_one_item(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = StageProcess(Stage(name="work", function=stage_functions.pid_of_process, executor="process"))
    first = process("n0", b"")
    pipe = process._pipe
    assert pipe is not None
    receive = pipe.recv

    def cut_off() -> object:
        os.kill(first, signal.SIGKILL)
        receive()
        raise OSError("got end of file during message")

    monkeypatch.setattr(pipe, "recv", cut_off, raising=False)
    with pytest.raises(StageError, match=r"sample 'n1': process \d+ was killed by SIGKILL"):
        process("n1", b"")
    assert process("n2", b"") != first
    process.close()


def test_leaving_early_ends_the_processes() -> None:
    results = run_pipeline(one_stage(stage_functions.hang_at_three, executor="process"), numbers(9))
    assert next(results) == 0
    began = time.monotonic()
    results.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 30
    assert no_worker_is_left()


def test_functions_that_cannot_be_sent_are_named() -> None:
    def local(value: int) -> int:
        return value

    with pytest.raises(StageError, match=r"stage 'work': .*<locals>\.local cannot be sent to a process"):
        one_stage(local, executor="process")
    with pytest.raises(StageError, match="cannot be sent to a process, it cannot be pickled"):
        one_stage(functools.partial(stage_functions.double, lock=threading.Lock()), executor="process")


def test_functions_of_a_session_are_named() -> None:
    script = textwrap.dedent(
        """
        from datapipe.stages import Stage
        def reward(value):
            return value
        Stage(name="score", function=reward, executor="process")
        """
    )
    result = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert "__main__.reward cannot be sent to a process, it is defined in this session only" in result.stderr


HANGING = """
import sys, time
from datapipe.pipeline import run_pipeline
from datapipe.stage_process import StageProcess
from datapipe.stages import Pipeline, Stage
from tests.datapipe.stage_functions import hang_at_three
if __name__ == "__main__":
    stage = Stage(name="decode", function=hang_at_three, executor=sys.argv[1], timeout_s=float(sys.argv[2]))
    for result in run_pipeline(Pipeline(stages=(stage,), watchdog_s=0.2), [("k", 0), ("l", 3)]):
        print(result, flush=True)
"""


def test_a_thread_that_hangs_is_an_error_and_the_program_ends(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    result = subprocess.run(
        [sys.executable, str(tmp_path / "hanging.py"), "thread", "0.5"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=50,
        check=False,
    )
    assert result.returncode == 1 and result.stdout == "0\n"
    assert "StageError: stage 'decode', worker datapipe-decode-0 is at sample 'l'" in result.stderr
    assert "a thread is left behind" in result.stderr


def test_a_termination_takes_the_processes_along(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    command = [sys.executable, str(tmp_path / "hanging.py"), "process", "60"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as program:
        assert program.stdout is not None and program.stdout.readline() == "0\n"
        children = psutil.Process(program.pid).children(recursive=True)
        assert children
        program.send_signal(signal.SIGTERM)
        assert program.wait(30) == -signal.SIGTERM
    assert not psutil.wait_procs(children, timeout=30)[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency is 0, wanted 1 or more"),
        ({"queue_size": 0}, "queue_size is 0"),
        ({"max_failures": -1}, "max_failures is -1"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"executor": "fiber"}, "executor is 'fiber', wanted one of thread, process"),
    ],
)
def test_stages_that_cannot_run_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StageError, match=message):
        one_stage(uneven, **options)


def test_stages_need_names_of_their_own() -> None:
    stage = Stage(name="a", function=uneven)
    with pytest.raises(StageError, match=r"named \['a', 'a'\]"):
        Pipeline(stages=(stage, stage))
    with pytest.raises(StageError, match="max_in_flight is 0"):
        Pipeline(stages=(stage,), max_in_flight=0)
