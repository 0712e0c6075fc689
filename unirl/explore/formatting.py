"""Numbers as the report writes them; a dash where a number is not known."""

from __future__ import annotations

import math

__all__ = ["duration", "figure", "fixed", "percent", "points", "size"]

_UNKNOWN = "–"  # noqa: RUF001


def percent(value: float) -> str:
    """A fraction as percent."""
    return f"{100 * value:.1f}%" if math.isfinite(value) else _UNKNOWN


def points(value: float) -> str:
    """A difference of fractions in percentage points, with its sign."""
    return f"{100 * value:+.1f}" if math.isfinite(value) else _UNKNOWN


def figure(value: object) -> str:
    """Any number, to three digits."""
    if isinstance(value, int | float) and math.isfinite(value):
        return f"{value:.3g}"
    return _UNKNOWN


def fixed(value: float | None) -> str:
    """A number near one, to two places."""
    return _UNKNOWN if value is None or not math.isfinite(value) else f"{value:.2f}"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if not math.isfinite(seconds):
        return _UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


def size(num_bytes: float) -> str:
    """Bytes in GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if math.isfinite(num_bytes) else _UNKNOWN
