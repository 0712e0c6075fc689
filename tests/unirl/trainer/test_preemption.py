from __future__ import annotations

import os
import signal

import pytest

from unirl.trainer.preemption import REQUEUE_EXIT_CODE, StopRequest


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
