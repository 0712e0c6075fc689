"""Text is taken as it is or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datapipe.decode import check_text
from datapipe.decode.text import INVISIBLE
from datapipe.errors import DecodeError


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
def test_proper_text_is_not_changed(text: str) -> None:
    if text.strip(INVISIBLE):
        assert check_text(text, field="caption") == text


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "caption_none"),
        (float("nan"), "caption_nan"),
        (1.5, "caption_number"),
        (3, "caption_number"),
        (False, "caption_bool"),
        (["a"], "caption_list"),
        ({"a": 1}, "caption_dict"),
        (b"bytes", "caption_bytes"),
        (object(), "caption_other_type"),
        ("", "caption_empty"),
        (" \n\t\u3000", "caption_empty"),
        ("\u200b", "caption_empty"),
        ("\ufeff\xa0\u2060\n", "caption_empty"),
        ("a\0", "nul_byte"),
        ("a\ud800", "not_utf8"),
    ],
)
def test_everything_else_has_a_reason(value: object, reason: str) -> None:
    with pytest.raises(DecodeError) as caught:
        check_text(value, field="caption")
    assert caught.value.reason == reason


def test_marks_that_show_nothing_stay_in_texts_that_show_something() -> None:
    for text in ("\u200b a", "\U0001f469\u200d\U0001f467", "\u2764\ufe0f", "\u0600"):
        assert check_text(text, field="caption") == text


def test_white_space_is_invisible() -> None:
    assert all(each in INVISIBLE for each in map(chr, range(0x3100)) if each.isspace())
