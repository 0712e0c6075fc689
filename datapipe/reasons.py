"""Codes by which bad samples are counted."""

from __future__ import annotations

from datapipe.errors import DataError

__all__ = ["reason_of"]


def reason_of(error: BaseException) -> str:
    """The reason of one of our own errors, else the name of its type."""
    reason = getattr(error, "reason", None) if isinstance(error, DataError) else None
    return str(reason or type(error).__name__)
