"""Rewards as users write them, good and bad, in a module that other processes can import."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time

from unirl.types import Sample


def mean_red(sample: Sample) -> float:
    if not sample.image.size:
        raise ValueError("no pixels")
    return float(sample.image[:, :, 0].mean() / 255)


def length_and_parts(sample: Sample) -> dict[str, float]:
    words = len(sample.caption.split())
    return {"total": words / 10, "words": words}


def by_caption(sample: Sample) -> object:
    """Does what the caption says."""
    match sample.caption:
        case "hang":
            while True:
                time.sleep(0.05)
        case "regex":
            return float(re.search(r"(a+)+$", "a" * 40 + "b") is not None)
        case "exit":
            sys.exit(3)
        case "end":
            os._exit(0)
        case "segfault":
            ctypes.string_at(0)
        case "raise":
            raise KeyError("no such colour")
        case "nan":
            return float("nan")
        case "none":
            return None
        case "text":
            return "0.7 or so"
    return 1.0


class Scale:
    """A reward with a setting, as an object that can be called."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, sample: Sample) -> float:
        return self.factor * len(sample.caption)
