from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from unirl.trainer.preemption import REQUEUE_EXIT_CODE, Interrupted, StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noted_and_nothing_else_happens(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.is_made
        os.kill(os.getpid(), number)
        assert stop.is_made
        os.kill(os.getpid(), number)
        assert stop.is_made
    assert signal.getsignal(number) is before


def test_what_handled_the_signal_before_is_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), StopRequest():
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_code_is_the_one_that_schedulers_know() -> None:
    assert REQUEUE_EXIT_CODE == os.EX_TEMPFAIL == 75


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_what_can_be_done_again_is_left_at_once_and_only_once(number: signal.Signals) -> None:
    with StopRequest() as stop:
        with pytest.raises(Interrupted), stop.interruptible():
            os.kill(os.getpid(), number)
            pytest.fail("the block went on")
        os.kill(os.getpid(), number)
        assert stop.is_made


def test_a_wait_that_can_be_done_again_is_left_at_once() -> None:
    """A call that sleeps or waits for an answer does not hold the request up."""
    waiting = threading.Event()
    with StopRequest() as stop, pytest.raises(Interrupted), stop.interruptible():
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        waiting.wait(timeout=60)


def test_no_such_block_is_begun_after_a_request() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted), stop.interruptible():
            pytest.fail("the block was begun")


def test_a_reward_that_catches_everything_does_not_catch_it() -> None:
    with StopRequest() as stop, pytest.raises(Interrupted), stop.interruptible():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception:
            pytest.fail("it was swallowed")


def test_blocks_of_one_request_can_be_nested() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        with stop:
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_made
    assert signal.getsignal(signal.SIGTERM) is before


BUSY = """
import os, signal, sys, time
from unirl.trainer.preemption import StopRequest
with StopRequest(grace_s=0.5):
    sys.stdout.write("ready\\n"); sys.stdout.flush()
    if sys.argv[1] == "python":
        while True:
            time.sleep(0.1)
    import ctypes
    ctypes.CDLL(None).sleep(100)  # returns only when it is over, or at a signal
    ctypes.CDLL(None).sleep(100)
"""


@pytest.mark.parametrize("where", ["python", "another language"])
def test_a_process_that_is_still_busy_is_ended_with_the_code(where: str) -> None:
    """A long update, a call that does not come back: the scheduler still gets its answer."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, where], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == REQUEUE_EXIT_CODE
        assert b"the next start goes on from the last whole checkpoint" in process.stderr.read()
