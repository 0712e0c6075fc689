"""Words of captions: pieces, and the same text again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.words import apart, join_words, split_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a red circle.", ["a", "red", "circle."]),
        ("红色 circle", ["红", "##色", "circle"]),
        ("T恤x", ["T", "##恤", "##x"]),
        ("", []),
    ],
)
def test_words_are_split_by_hand(text: str, words: list[str]) -> None:
    assert split_words(text) == words
    assert join_words(words) == text


def test_symbols_are_words_where_that_is_asked_for() -> None:
    assert apart(symbols=True).normalize_str("it's 红色。") == "it ##' ##s 红 ##色 ##。"


@given(st.text(alphabet="ab红色のก ", max_size=12))
def test_joining_undoes_splitting(text: str) -> None:
    assert join_words(split_words(text)) == " ".join(text.split())
