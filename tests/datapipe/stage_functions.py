"""Functions that a process can import."""

from __future__ import annotations

import os
import signal
import sys
import time


def double(value: int) -> int:
    return 2 * value


def fail_at_three(value: int) -> int:
    if value == 3:
        raise ValueError("three is bad")
    return value


def kill_at_three(value: int) -> int:
    if value == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def exit_at_three(value: int) -> int:
    if value == 3:
        sys.exit(4)
    return value


def hang_at_three(value: int) -> int:
    if value == 3:
        time.sleep(60)
    return value


def unsendable(value: int) -> object:
    return lambda: value
