"""Text is taken as it is or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datapipe.decode import check_text
from datapipe.errors import DecodeError


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
def test_proper_text_is_not_changed(text: str) -> None:
    if text.strip():
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
        ("a\0", "nul_byte"),
        ("a\ud800", "not_utf8"),
    ],
)
def test_everything_else_has_a_reason(value: object, reason: str) -> None:
    with pytest.raises(DecodeError) as caught:
        check_text(value, field="caption")
    assert caught.value.reason == reason
