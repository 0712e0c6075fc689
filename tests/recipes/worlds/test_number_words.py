from __future__ import annotations

import pytest

from recipes.worlds.number_words import NUMBERS, number_to_words, words_to_number


@pytest.mark.parametrize(
    ("number", "words"),
    [(10, "ten"), (17, "seventeen"), (20, "twenty"), (42, "forty two"), (80, "eighty"), (99, "ninety nine")],
)
def test_spells_as_a_person_would(number: int, words: str) -> None:
    assert number_to_words(number) == words


def test_every_number_reads_back() -> None:
    assert [words_to_number(number_to_words(number)) for number in NUMBERS] == list(NUMBERS)


@pytest.mark.parametrize("words", ["", "seven", "forty ten", "two forty", "forty  two", "Forty two", "42"])
def test_other_words_are_no_number(words: str) -> None:
    assert words_to_number(words) is None


@pytest.mark.parametrize("number", [9, 100, -1])
def test_outside_the_range_is_an_error(number: int) -> None:
    with pytest.raises(ValueError, match=r"10\.\.99"):
        number_to_words(number)
