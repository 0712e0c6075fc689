"""Lets a training loop of its own run one step at a time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Pace"]


class Pace:
    """Runs `train(between_steps)` in a thread that waits in `between_steps` until the next step is wanted."""

    def __init__(self, train: Callable[[Callable[..., None]], Any]) -> None:
        """Start the thread; it stops at the end of the first step, whose time counts nowhere.

        Args:
            train: Calls its argument once after every step.
        """
        self._go: queue.Queue[None] = queue.Queue()
        self._done: queue.Queue[BaseException | float] = queue.Queue()
        self._train = train
        self._started = time.perf_counter()
        threading.Thread(target=self._run, daemon=True).start()
        self._result()

    def step(self) -> float:
        """Seconds of one more step."""
        self._go.put(None)
        return self._result()

    def between_steps(self, *_: object) -> None:
        """Report the step that just ended and wait."""
        self._done.put(time.perf_counter() - self._started)
        self._go.get()
        self._started = time.perf_counter()

    def _run(self) -> None:
        try:
            self._train(self.between_steps)
        except BaseException as error:
            self._done.put(error)
        else:
            self._done.put(RuntimeError("training ended before the benchmark did"))

    def _result(self) -> float:
        result = self._done.get()
        if isinstance(result, BaseException):
            raise result
        return result
