"""Captions are text or they are refused: nothing is turned into a string by guess."""

from __future__ import annotations

import math

from datapipe.errors import DecodeError

__all__ = ["check_text"]


def check_text(value: object, *, field: str) -> str:
    """Return value as it is when it is proper text.

    Args:
        value: What the source holds.
        field: Name for reason codes and messages, such as `caption`.

    Returns:
        The same characters; nothing is stripped or repaired.

    Raises:
        DecodeError: Reasons `<field>_none`, `<field>_nan`, `<field>_bool`, `<field>_number`,
            `<field>_list`, `<field>_dict`, `<field>_bytes`, `<field>_other_type`, `<field>_empty` (only
            white space), `nul_byte` (readers in C would cut the text there), `not_utf8` (a lone surrogate
            has no bytes).
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
    if not text.strip():
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
