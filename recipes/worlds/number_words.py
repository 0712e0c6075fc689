"""Numbers from 10 to 99 as English words, and back."""

from __future__ import annotations

__all__ = ["NUMBERS", "number_to_words", "words_to_number"]

NUMBERS = range(10, 100)

_TEENS = (
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_UNITS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def number_to_words(number: int) -> str:
    """Spell a number from 10 to 99, for example 42 as "forty two" and 80 as "eighty".

    Raises:
        ValueError: If the number is outside 10..99.
    """
    if number not in NUMBERS:
        raise ValueError(f"number {number} is outside {NUMBERS.start}..{NUMBERS.stop - 1}")
    tens, unit = divmod(number, 10)
    if tens == 1:
        return _TEENS[unit]
    return _TENS[tens - 2] if unit == 0 else f"{_TENS[tens - 2]} {_UNITS[unit - 1]}"


_NUMBER_OF_WORDS = {number_to_words(number): number for number in NUMBERS}


def words_to_number(words: str) -> int | None:
    """Read the words of `number_to_words` back; None for anything else."""
    return _NUMBER_OF_WORDS.get(words)
