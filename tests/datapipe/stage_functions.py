"""Functions that a process can import."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from datapipe.errors import DataError
from datapipe.fields import RawSample


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


@dataclass(frozen=True)
class NumberField:
    """Reads the number of a row, and does to the process what the number says."""

    columns: tuple[str, ...] = ("number",)
    tensors: tuple[str, ...] = ()
    needs_blob: bool = False

    def read(self, raw: RawSample) -> np.ndarray:
        number = int(raw.columns["number"])
        if number == 13:
            raise DataError("thirteen is bad")
        if number == 23:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 33:
            os.kill(os.getpid(), signal.SIGSTOP)
        if number == 43:
            sys.exit(4)
        if number == 53:
            time.sleep(60)
        return np.full(3, number, np.float32)


def letters(text: str) -> list[int]:
    """A token for each letter: a is 1, b is 2."""
    return [ord(letter) - 96 for letter in text]


def brighter(image: Tensor, generator: torch.Generator) -> Tensor:
    return (image.float() / 255 + float(torch.rand((), generator=generator))) / 2


def pid_of_process(value: bytes) -> int:
    return os.getpid()
