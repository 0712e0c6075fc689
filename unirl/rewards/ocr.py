"""Reward on the words that can be read in a picture."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

import numpy as np

from unirl.errors import ConfigError
from unirl.rewards.failures import Problem
from unirl.rewards.pictures import picture_problem
from unirl.rewards.rules import Rule
from unirl.types import Sample

__all__ = ["PictureText", "edit_distance", "rapid_reader", "wanted_text"]

QUOTED = re.compile('"([^"]+)"|“([^”]+)”')

Reader = Callable[[np.ndarray], str]
"""uint8 (H, W, 3) RGB -> the text in the picture, lines joined by blanks; "" where there is none."""


class PictureText(Rule):
    """How much of the wanted text can be read in the picture: 1 - distance / length, at least 0.

    Distance is the number of letters to insert, delete or replace, and length that of the longer text; case
    and the width of blanks do not count. The wanted text is what stands between quotation marks in the
    caption. Without any, there is nothing to read, and the sample has no score.

    Args:
        reader: Reads a picture; None takes RapidOCR, whose models come with its package.

    Raises:
        ConfigError: If no reader is given and RapidOCR is not installed.
    """

    def __init__(self, reader: Reader | None = None, *, max_failed_fraction: float = 0.1) -> None:
        read = reader or rapid_reader()

        def rule(sample: Sample) -> float | Problem:
            wanted = wanted_text(sample.caption)
            if not wanted:
                return Problem(reason="no text wanted", text="the caption holds no text in quotation marks")
            if (found := picture_problem(sample.image)) is not None:
                return Problem(reason="picture", text=found)
            return likeness(read(sample.image), wanted)

        super().__init__(
            "picture_text",
            rule,
            settings="rapidocr" if reader is None else getattr(reader, "__qualname__", type(reader).__name__),
            max_failed_fraction=max_failed_fraction,
        )


def wanted_text(caption: str) -> str:
    """What stands between quotation marks, joined by blanks; "" where nothing does."""
    return " ".join(first or second for first, second in QUOTED.findall(caption))


def likeness(found: str, wanted: str) -> float:
    """1 for equal texts, 0 for texts with nothing in common; case and the width of blanks do not count."""
    found, wanted = (" ".join(text.casefold().split()) for text in (found, wanted))
    return 1.0 - edit_distance(found, wanted) / max(len(found), len(wanted), 1)


def edit_distance(one: str, other: str) -> int:
    """Fewest insertions, deletions and replacements of letters that turn one text into the other."""
    row = list(range(len(other) + 1))
    for place, letter in enumerate(one, start=1):
        diagonal, row[0] = row[0], place
        for column, wanted in enumerate(other, start=1):
            diagonal, row[column] = (
                row[column],
                min(row[column] + 1, row[column - 1] + 1, diagonal + (letter != wanted)),
            )
    return row[-1]


def rapid_reader(*, threads: int | Literal["all"] = 1) -> Reader:
    """A reader over RapidOCR.

    Args:
        threads: Of ONNX Runtime inside one picture.

    Raises:
        ConfigError: If the package is not installed.
    """
    try:
        from rapidocr import RapidOCR
    except ImportError as error:
        raise ConfigError(
            f"reading text in pictures needs {error.name}; `pip install 'unirl[ocr]'`"
        ) from None
    count = -1 if threads == "all" else threads
    engine = RapidOCR(
        params={"Global.log_level": "error", "EngineConfig.onnxruntime.intra_op_num_threads": count}
    )

    def read(picture: np.ndarray) -> str:
        # RapidOCR takes arrays in OpenCV's order of channels.
        return " ".join(engine(np.ascontiguousarray(picture[:, :, ::-1])).txts or ())

    return read
