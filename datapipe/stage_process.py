"""A process that runs the function of a stage, and is told apart from its errors when it dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pickle import PicklingError
from typing import Any, Final

from datapipe.errors import StageError
from datapipe.reasons import reason_of
from datapipe.stages import Stage

__all__ = ["StageProcess"]

_GRACE_S: Final = 1.0  # the call itself ends what takes too long to answer
_START_S: Final = 120.0
_START_HINT: Final = (
    "it imports the program afresh, so that a script needs `if __name__ == '__main__':` around its body"
)


class StageProcess:
    """Runs one item at a time in a process, which is started at the first item and after a death."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._is_closed = False
        self._is_ready = False
        self._began: float | None = None  # when the item that is under way was sent
        self._is_overdue = False
        self._lock = threading.Lock()

    def __call__(self, key: str, value: Any) -> Any:
        """Run the function on an item.

        Raises:
            StageError: When the function raises, exits or kills the process, takes longer than the stage
                allows, or when an item or a result cannot be pickled.
        """
        process, pipe = self._running()
        place = f"stage {self._stage.name!r}, sample {key!r}"
        if not self._is_ready:
            self._await_start(place, process, pipe)
        self._began = time.monotonic()
        try:
            return self._exchange(place, value, process, pipe)
        finally:
            self._began = None

    def end_if_overdue(self) -> None:
        """End a process that takes no item or stops in the middle of a result, which holds the caller up.

        For another thread than that of the call, which then fails as after any death.
        """
        began, process, limit = self._began, self._process, self._stage.timeout_s
        if began is None or process is None or limit is None:
            return
        if time.monotonic() - began > limit + _GRACE_S:
            self._is_overdue = True
            process.kill()

    def _exchange(
        self, place: str, value: Any, process: multiprocessing.process.BaseProcess, pipe: Connection
    ) -> Any:
        try:
            pipe.send(value)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died(place, process) from error
        except (AttributeError, TypeError, ValueError, PicklingError) as error:
            raise StageError(
                f"{place}: the item cannot be sent to a process: {error}", "unsendable"
            ) from error
        if not wait([pipe, process.sentinel], timeout=self._stage.timeout_s):
            self._kill()
            raise self._timed_out(place, process.pid)
        try:
            is_ok, answer = pipe.recv()
        except (EOFError, OSError) as error:  # OSError in the middle of a result
            raise self._died(place, process) from error
        if is_ok:
            return answer
        text, where, reason = answer
        failure = StageError(f"{place}: {text}", reason)
        failure.add_note(where)
        raise failure

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def close(self) -> None:
        """End the process at once. A call that is under way in another thread fails."""
        with self._lock:
            self._is_closed = True
        self._kill()

    def _running(self) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        with self._lock:
            if self._is_closed:
                raise StageError(f"stage {self._stage.name!r} was stopped")
            if self._process is None or self._pipe is None:
                self._process, self._pipe = self._start()
            return self._process, self._pipe

    def _start(self) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        context = multiprocessing.get_context("spawn")
        try:
            with ExitStack() as stack:
                mine, theirs = map(stack.enter_context, context.Pipe())
                process = context.Process(
                    target=_serve,
                    args=(theirs, self._stage.function),
                    name=f"datapipe-{self._stage.name}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                stack.pop_all()
        except OSError as error:
            raise StageError(
                f"stage {self._stage.name!r}: no process could be started: {error.strerror or error}; raise "
                f"the limits of open files and processes (`ulimit -n`, `ulimit -u`), or use threads"
            ) from error
        return process, mine

    def _await_start(
        self, place: str, process: multiprocessing.process.BaseProcess, pipe: Connection
    ) -> None:
        """What a fresh process imports is not counted as time of a sample."""
        if not wait([pipe, process.sentinel], timeout=_START_S):
            self._kill()
            raise StageError(
                f"{place}: process {process.pid} did not start within {_START_S:g} s; {_START_HINT}", "died"
            )
        try:
            pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._died(place, process) from error
        self._is_ready = True

    def _died(self, place: str, process: multiprocessing.process.BaseProcess) -> StageError:
        process.join()
        if self._is_overdue:
            self._forget()
            return self._timed_out(place, process.pid)
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        what = "gave a result" if self._is_ready else f"was ready; {_START_HINT}"
        pid = process.pid
        self._forget()
        return StageError(f"{place}: process {pid} {how} before it {what}", "died")

    def _timed_out(self, place: str, pid: int | None) -> StageError:
        limit = self._stage.timeout_s
        return StageError(
            f"{place}: process {pid} was ended, it took longer than timeout_s={limit:g}", "timed_out"
        )

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            process.join()
            self._forget()

    def _forget(self) -> None:
        pipe, self._pipe, self._process = self._pipe, None, None
        self._is_ready = self._is_overdue = False
        if pipe is not None:
            pipe.close()


def _serve(pipe: Connection, function: Callable[[Any], Any]) -> None:
    """Answer items until the pipe closes. Ctrl-C is the parent's to handle; its death ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pipe.send(None)
    while True:
        try:
            value = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = True, function(value)
        except Exception as error:  # whatever a user's function raises goes to the consumer
            answer = False, (f"{type(error).__name__}: {error}", traceback.format_exc(), reason_of(error))
        try:
            pipe.send(answer)
        except (AttributeError, TypeError, ValueError, PicklingError) as error:
            told = f"the result cannot be sent back: {error}"
            pipe.send((False, (told, traceback.format_exc(), "unsendable")))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
