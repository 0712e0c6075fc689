"""A polite request to stop: noted at once, honoured where nothing is lost, answered with a requeue code."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["GRACE_S", "REQUEUE_EXIT_CODE", "Interrupted", "StopAsked", "StopRequest"]

log = logging.getLogger("unirl.trainer.preemption")

REQUEUE_EXIT_CODE = 75
"""EX_TEMPFAIL: "try again later", which schedulers can be told to requeue on."""
GRACE_S = 14.0
"""From the signal to the end of the process, whatever it is doing."""


class StopAsked(Exception):
    """The run was asked to stop; its state is saved and the next start goes on from there."""


class Interrupted(BaseException):
    """Ends what can be done again after a request to stop. No `except Exception` holds it up."""


class StopRequest:
    """Notes SIGTERM and SIGUSR1 while its `with` block runs. A second signal changes nothing.

    A process that is still there `grace_s` after the first signal (in a long update, in a call that does not
    come back, in a save to slow storage) is ended with the requeue code. A run can be killed at any instant,
    so that costs no more than the steps since the last whole checkpoint.

    Blocks of one request may be nested; only the outermost installs and restores handlers. Outside the main
    thread, where signals cannot be handled, nothing is noted.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self, *, grace_s: float = GRACE_S) -> None:
        self.is_made = False
        self._grace_s = grace_s
        self._depth = 0
        self._may_interrupt = False

    def __enter__(self) -> StopRequest:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
            self._ended = threading.Event()
            read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            # The thread hears of a signal even while the main thread is inside a long call.
            self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._watch, args=(read,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and threading.current_thread() is threading.main_thread():
            self._ended.set()
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._write)
            self._thread.join()
            for number, handler in self._before.items():
                signal.signal(number, handler)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A block that can be done again: it may end at any instant with `Interrupted`, once.

        Raises:
            Interrupted: If the request is there already, or when it comes.
        """
        self._may_interrupt = True
        try:
            if self.is_made:
                raise Interrupted
            yield
        finally:
            self._may_interrupt = False

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.is_made = True
        if self._may_interrupt:
            self._may_interrupt = False
            raise Interrupted

    def _watch(self, read: int) -> None:
        """End the process if the block is still running `grace_s` after the first of the signals."""
        with open(read, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] in self.SIGNALS and not self._ended.wait(self._grace_s):
                    log.error(
                        "still busy %.0f s after the request to stop: ended as it is; the next start goes on "
                        "from the last whole checkpoint",
                        self._grace_s,
                    )
                    sys.stderr.flush()
                    os._exit(REQUEUE_EXIT_CODE)
