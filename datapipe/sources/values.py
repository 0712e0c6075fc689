"""Metadata values as the index can hold them."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import uuid
from typing import Final

from datapipe.decode.text import INVISIBLE, check_text
from datapipe.errors import DecodeError

__all__ = ["clean_value", "is_kept_whole"]

_INT64_MAX: Final = 2**63 - 1


def clean_value(value: object, *, field_name: str) -> str | int | float | bool | None:
    """Turn one metadata value into what the index can hold without losing anything.

    Text, booleans and integers of 64 bits stay. NaN becomes None, in nested values as well as infinities,
    which JSON does not know; see is_kept_whole. Larger integers, decimals, dates and nested values become
    text (JSON for lists and dicts), so that no type is guessed from a first row.

    Raises:
        DecodeError: Reason `nul_byte` or `not_utf8` for text that other readers would cut or refuse.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return check_text(value, field=field_name) if value.strip(INVISIBLE) else value
    if isinstance(value, int):
        return value if -_INT64_MAX - 1 <= value <= _INT64_MAX else str(value)
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, decimal.Decimal | datetime.timedelta | uuid.UUID):
        return str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    try:
        text = json.dumps(_finite(value), ensure_ascii=False, default=_json_default)
    except (TypeError, ValueError, RecursionError) as error:
        raise DecodeError(
            "bad_value", f"{field_name}: {type(value).__name__} cannot be kept: {error}"
        ) from error
    return check_text(text, field=field_name)


def is_kept_whole(value: object) -> bool:
    """Whether clean_value keeps every number in a list or dict; false where one is NaN or an infinity."""
    if not isinstance(value, dict | list | tuple):
        return True
    waiting: list[object] = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list | tuple):
            waiting.extend(one.values() if isinstance(one, dict) else one)
        elif isinstance(one, float) and not math.isfinite(one):
            return False
    return True


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _json_default(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)
