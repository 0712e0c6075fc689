from __future__ import annotations

import math

import pytest

from unirl.explore import formatting


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.25, "0.25 s"), (59.4, "59.4 s"), (60, "1 min 0 s"), (125.4, "2 min 5 s"), (7265, "2 h 1 min")],
)
def test_durations_are_said_in_fitting_units(seconds: float, said: str) -> None:
    assert formatting.duration(seconds) == said


def test_numbers_keep_the_digits_that_matter() -> None:
    assert formatting.percent(0.12345) == "12.3%"
    assert formatting.points(-0.05) == "-5.0"
    assert formatting.points(0.05) == "+5.0"
    assert formatting.figure(0.00012345) == "0.000123"
    assert formatting.fixed(0.876) == "0.88"
    assert formatting.size(3 * 2**29) == "1.50 GiB"


@pytest.mark.parametrize("name", formatting.__all__)
def test_what_is_not_known_is_a_dash(name: str) -> None:
    assert getattr(formatting, name)(math.nan) == "\u2013"


def test_null_from_the_store_is_a_dash() -> None:
    assert formatting.figure(None) == formatting.fixed(None) == "\u2013"
