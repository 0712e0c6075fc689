"""User code in processes of its own: what hangs, crashes or exits there costs one item and no run."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import re
import signal
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from unirl.errors import ConfigError
from unirl.rewards.failures import Problem

__all__ = ["WorkerPool"]

logger = logging.getLogger("unirl.rewards")

START_LIMIT_S: Final = 600.0
MOST_LOST_STARTS: Final = 4
"""In a row, once a process has started at all; before that the first is one too many."""
GRACE_S: Final = 2.0
"""A worker ends itself when an item takes too long; this much later it is killed from outside."""
FRAME: Final = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
NUM_FRAMES: Final = 6
READY: Final = "ready"


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    dump: Path
    """Where the stack goes when an item takes too long or the process crashes."""
    is_ready: bool = False
    item: int = -1
    """What it works on; -1: nothing."""
    deadline: float = 0.0
    """Of the monotonic clock, for the item or for the start."""


class WorkerPool:
    """Calls one function for many items, each within a time limit, in a fixed number of processes.

    Args:
        function: Takes an item, returns something plain, or a `Problem`. Must be importable by its name.
        name: For messages.
        num_workers: Processes. They start with the first call, and again after each one that was lost.
        limit_s: Longest time for one item, seconds.
    """

    def __init__(
        self, function: Callable[[Any], object], *, name: str, num_workers: int, limit_s: float
    ) -> None:
        self._function, self._name, self._limit_s = function, name, limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="unirl-reward-")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["unirl.rewards.user"])
        self._workers: list[_Worker | None] = [None] * num_workers
        self._started = 0
        self._can_start, self._lost_starts = False, 0
        self._finalizer = weakref.finalize(self, _end_all, self._workers, self._folder)

    def run(self, items: Sequence[object]) -> list[object]:
        """Return what the function gave for each item, in their order; a `Problem` where it gave nothing.

        Raises:
            ConfigError: If the first process cannot even start, or later too many in a row.
        """
        answers: dict[int, object] = {}
        waiting = list(range(len(items)))[::-1]
        while len(answers) < len(items):
            for place, worker in enumerate(self._workers):
                if not waiting:
                    break
                current = worker or self._start(place)
                if not current.is_ready or current.item >= 0:
                    continue
                if not current.process.is_alive():  # ended while idle, which is no item's fault
                    current.connection.close()
                    self._start(place)
                else:
                    self._give(current, waiting.pop(), items)
            for worker in self._talking():
                self._listen(worker, answers)
            self._kill_late(answers)
        return [answers[number] for number in range(len(items))]

    def close(self) -> None:
        """End the processes; also done when the pool is forgotten."""
        self._finalizer()

    def _start(self, place: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        self._started += 1
        dump = Path(self._folder.name) / f"{self._started}.txt"
        process = self._context.Process(
            target=_serve,
            args=(theirs, self._function, self._limit_s, str(dump)),
            name=f"reward {self._name}",
            daemon=True,
        )
        process.start()
        theirs.close()
        worker = _Worker(process, ours, dump, deadline=time.monotonic() + START_LIMIT_S)
        self._workers[place] = worker
        return worker

    def _give(self, worker: _Worker, number: int, items: Sequence[object]) -> None:
        worker.item = number
        worker.deadline = time.monotonic() + self._limit_s + GRACE_S
        with suppress(ConnectionError):  # it died in between; listening finds out how
            worker.connection.send(items[number])

    def _talking(self) -> list[_Worker]:
        """Workers that have something to say, or have ended; waits for one, or for the next deadline."""
        busy = [worker for worker in self._workers if worker and (worker.item >= 0 or not worker.is_ready)]
        if not busy:
            return []
        left = min(worker.deadline for worker in busy) - time.monotonic()
        ready = wait([worker.connection for worker in busy], timeout=max(left, 0.0))
        return [worker for worker in busy if worker.connection in ready]

    def _listen(self, worker: _Worker, answers: dict[int, object]) -> None:
        try:
            answer = worker.connection.recv()
        except (EOFError, OSError):  # it ended, perhaps in the middle of an answer
            self._lose(worker, answers, killed=False)
            return
        if not worker.is_ready:
            worker.is_ready = True
            self._can_start, self._lost_starts = True, 0
        else:
            answers[worker.item], worker.item = answer, -1

    def _kill_late(self, answers: dict[int, object]) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker and (worker.item >= 0 or not worker.is_ready) and now > worker.deadline:
                worker.process.kill()
                self._lose(worker, answers, killed=True)

    def _lose(self, worker: _Worker, answers: dict[int, object], *, killed: bool) -> None:
        """Note why a worker is gone, and let another take its place."""
        worker.process.join()
        worker.connection.close()
        self._workers[self._workers.index(worker)] = None
        said = worker.dump.read_text(errors="replace") if worker.dump.exists() else ""
        if not worker.is_ready:
            self._lost_starts += 1
            if self._can_start and self._lost_starts <= MOST_LOST_STARTS:
                logger.warning("reward %s: a process was lost while it started, and is replaced", self._name)
                return
            raise ConfigError(
                f"reward {self._name}: its process ended while it started (exit code "
                f"{worker.process.exitcode}); the module of the function must be importable: {said.strip()}"
            )
        problem = _problem_of(worker.process.exitcode, said, self._limit_s, killed=killed)
        logger.warning("reward %s: a process was lost and is replaced: %s", self._name, problem.text)
        answers[worker.item] = problem


def _problem_of(exit_code: int | None, said: str, limit_s: float, *, killed: bool) -> Problem:
    frames = [f"{Path(path).name}:{line} in {name}" for path, line, name in FRAME.findall(said)]
    ours = next((place for place, frame in enumerate(frames) if frame.endswith(" in _serve")), NUM_FRAMES)
    stack = "; ".join(frames[:ours][:NUM_FRAMES]) or "unknown place"
    if killed or said.startswith("Timeout"):
        return Problem(reason="timed out", text=f"took over {limit_s:g} s; it was at {stack}")
    if exit_code is not None and exit_code < 0:
        return Problem(reason="crashed", text=f"{signal.Signals(-exit_code).name} at {stack}")
    return Problem(reason="exited", text=f"ended its process with exit code {exit_code}")


def _end_all(workers: list[_Worker | None], folder: tempfile.TemporaryDirectory[str]) -> None:
    for worker in workers:
        if worker is not None:
            worker.connection.close()
            worker.process.kill()
            worker.process.join()
    workers[:] = [None] * len(workers)
    folder.cleanup()


def _serve(connection: Connection, function: Callable[[Any], object], limit_s: float, dump: str) -> None:
    """The life of a worker: take an item, answer, until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Path(dump).open("w") as file:
        faulthandler.enable(file=file)
        connection.send(READY)
        while True:
            try:
                item = connection.recv()
            except EOFError:
                return
            # Written and ended by a thread that needs no interpreter, so a loop inside C code ends as well.
            faulthandler.dump_traceback_later(limit_s, exit=True, file=file)
            try:
                answer = function(item)
            except SystemExit as stop:
                answer = Problem(reason="exited", text=f"called sys.exit({stop.code!r})")
            except Exception as error:  # whatever a user's function raises is the failure of its sample
                answer = Problem(reason="raised", text=_place_of(error))
            finally:
                faulthandler.cancel_dump_traceback_later()
            connection.send(answer)


def _place_of(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
    return f"{type(error).__name__}: {error}{where}"
