"""Captions are text or they are refused: nothing is turned into a string by guess."""

from __future__ import annotations

import math
from typing import Final

from datapipe.errors import DecodeError

__all__ = ["INVISIBLE", "check_text"]

INVISIBLE: Final = (
    "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008"
    "\u2009\u200a\u2028\u2029\u202f\u205f\u3000"  # white space
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180e\u200b\u200c\u200d\u200e\u200f"
    "\u202a\u202b\u202c\u202d\u202e\u2060\u2061\u2062\u2063\u2064\u2066\u2067\u2068\u2069\u206a\u206b"
    "\u206c\u206d\u206e\u206f\u2800\u3164\ufe00\ufe0e\ufe0f\ufeff\uffa0"  # fillers, joiners, marks of order
)
"""Characters that show nothing: a text of these alone has nothing to read."""


def check_text(value: object, *, field: str) -> str:
    """Return value as it is when it is proper text.

    Args:
        value: What the source holds.
        field: Name for reason codes and messages, such as `caption`.

    Returns:
        The same characters; nothing is stripped or repaired.

    Raises:
        DecodeError: Reasons `<field>_none`, `<field>_nan`, `<field>_bool`, `<field>_number`,
            `<field>_list`, `<field>_dict`, `<field>_bytes`, `<field>_other_type`, `<field>_empty`
            (nothing but characters that show nothing), `nul_byte` (readers in C would cut the text there),
            `not_utf8` (a lone surrogate has no bytes).
    """
    if isinstance(value, str):
        return _check_characters(value, field)
    if value is None:
        raise DecodeError(f"{field}_none", f"{field} is null")
    if isinstance(value, float) and math.isnan(value):
        raise DecodeError(f"{field}_nan", f"{field} is NaN")
    for kind, name in (
        (bool, "bool"),
        (int | float, "number"),
        (list | tuple, "list"),
        (dict, "dict"),
        (bytes, "bytes"),
    ):
        if isinstance(value, kind):
            raise DecodeError(f"{field}_{name}", f"{field} is {value!r:.80}, wanted text")
    raise DecodeError(f"{field}_other_type", f"{field} is a {type(value).__name__}, wanted text")


def _check_characters(text: str, field: str) -> str:
    if not text.strip(INVISIBLE):
        raise DecodeError(f"{field}_empty", f"{field} is {text!r:.40}, without any character to read")
    position = text.find("\0")
    if position >= 0:
        raise DecodeError("nul_byte", f"{field} holds a NUL character at position {position}: {text!r:.80}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DecodeError(
            "not_utf8", f"{field} holds {text[error.start]!r} at position {error.start}, which is not text"
        ) from error
    return text
