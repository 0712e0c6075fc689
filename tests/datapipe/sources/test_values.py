"""Metadata values keep what they say."""

from __future__ import annotations

import datetime
import decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datapipe.errors import DecodeError
from datapipe.sources.values import clean_value


@given(st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False))
def test_plain_values_stay(value: object) -> None:
    assert clean_value(value, field_name="x") is value


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (2**64 - 1, "18446744073709551615"),
        (-(2**63) - 1, "-9223372036854775809"),
        (float("nan"), None),
        ("007", "007"),
        ("", ""),
        ("  ", "  "),
        (decimal.Decimal("1.10"), "1.10"),
        (datetime.date(2020, 1, 2), "2020-01-02"),
        (datetime.datetime(2020, 1, 2, 3, 4, tzinfo=datetime.UTC), "2020-01-02T03:04:00+00:00"),
        ([], "[]"),
        ({"a": [float("nan"), 1.5], "b": float("inf")}, '{"a": [null, 1.5], "b": null}'),
        ([{"k": "ü"}], '[{"k": "ü"}]'),
        ({"b": b"\x01", "d": datetime.date(2020, 1, 2)}, '{"b": "AQ==", "d": "2020-01-02"}'),
    ],
)
def test_other_values_become_text(value: object, wanted: object) -> None:
    assert clean_value(value, field_name="x") == wanted


@pytest.mark.parametrize(
    ("value", "reason"), [("a\0b", "nul_byte"), ("\ud800", "not_utf8"), (["\ud800"], "not_utf8")]
)
def test_text_that_others_would_cut_is_refused(value: object, reason: str) -> None:
    with pytest.raises(DecodeError, match="x holds") as caught:
        clean_value(value, field_name="x")
    assert caught.value.reason == reason
