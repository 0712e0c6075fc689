"""Whole numbers that a caller gives, as plain ints: states go to JSON, and arithmetic must not wrap."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from datapipe.errors import LoaderError

__all__ = ["check_whole_numbers", "positive_numbers", "whole_number"]


def whole_number(name: str, value: Any, lowest: int | None = None) -> int:
    """The value as an int; numbers of NumPy are taken, True and False are not.

    Raises:
        LoaderError: If it is no whole number, or below `lowest`.
    """
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or (lowest is not None and value < lowest):
        wanted = "a whole number" if lowest is None else f"a whole number, {lowest} or more"
        raise LoaderError(f"{name} is {value!r}, wanted {wanted}")
    return int(value)


def check_whole_numbers(name: str, values: Any, count: int, *, lowest: int, wanted: str) -> None:
    """Refuse what is no sequence of so many whole numbers.

    Raises:
        LoaderError: With the values and what is wanted.
    """
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != count:
        raise LoaderError(f"{name} is {values!r}, wanted {wanted}")
    for value in values:
        whole_number(f"{name} is {values!r}: one of its numbers", value, lowest)


def positive_numbers(name: str, values: ArrayLike, *, ndim: int, wanted: str) -> NDArray[np.int64]:
    """The values as int64, C-contiguous; the first axis is that of the rows of a view.

    Raises:
        LoaderError: For another number of axes. Names the first row with a value that is no whole number, or
            below 1.
    """
    given = np.asarray(values)
    if given.ndim != ndim or given.dtype.kind not in "iufO":
        raise LoaderError(f"{name} are {given.dtype} of shape {given.shape}, wanted {wanted}")
    floats = given.astype(np.float64)  # None becomes NaN
    wrong = ~((floats >= 1) & (floats == np.floor(floats)) & (floats < 2**63))
    if wrong.any():
        row = int(np.nonzero(wrong)[0][0])
        raise LoaderError(
            f"{name} of row {row} of the view are {np.ravel(given[row]).tolist()!r}, wanted {wanted}; leave "
            f"such rows out of the query"
        )
    return np.ascontiguousarray(given, np.int64)
