"""Words of a caption, for the models that are made from captions alone and so have an id a word.

Scripts without spaces between words (Chinese, Japanese, Thai and their like) have no words that a rule could
find, so there each character is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tokenizers import Regex, decoders, normalizers

__all__ = ["apart", "join_words", "split_words", "together"]

JOINED: Final = "##"
"""Begins a word that no space stands before, as in the vocabularies of BERT."""
UNSPACED: Final = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
SYMBOL: Final = r"[^\p{L}\p{M}\p{N}_\s]"
_FIRST: Final = Regex(rf"^(?!{JOINED})")
_JOINED: Final = Regex(rf"^{JOINED}")


def apart(*, symbols: bool) -> normalizers.Normalizer:
    """Put a space and `##` before each word that stands behind another without a space.

    Args:
        symbols: Whether full stops, commas and the like are words too, or parts of those they touch.

    Example: "it's 红色。" becomes "it ##' ##s 红 ##色 ##。", and without symbols "it's 红 ##色 ##。".
    """
    alone = f"(?:{UNSPACED}|{SYMBOL})" if symbols else UNSPACED
    return normalizers.Replace(Regex(rf"(?<=\S)(?={alone})|(?<={alone})(?=\S)"), f" {JOINED}")


def together() -> decoders.Decoder:
    """Write words as text: with a space before each that does not begin with `##`."""
    spaced, joined = decoders.Replace(_FIRST, " "), decoders.Replace(_JOINED, "")
    return decoders.Sequence([spaced, joined, decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def split_words(text: str) -> list[str]:
    """The words of a text, those behind no space with `##`; symbols are parts of the words they touch."""
    words: list[str] = _APART.normalize_str(text).split()
    return words


def join_words(words: Iterable[str]) -> str:
    """Words as text, one space between them; undoes `split_words`."""
    text: str = _TOGETHER.decode(list(words))
    return text


_APART: Final = apart(symbols=False)
_TOGETHER: Final = together()
