"""A polite request to stop: noted at once, honoured at the next step's end, answered with a requeue code."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["REQUEUE_EXIT_CODE", "StopRequest"]

REQUEUE_EXIT_CODE = 75
"""EX_TEMPFAIL: "try again later", which schedulers can be told to requeue on."""


class StopRequest:
    """Notes SIGTERM and SIGUSR1 while its `with` block runs. A second signal changes nothing."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.is_made = False

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.is_made = True
