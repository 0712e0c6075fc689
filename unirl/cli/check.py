"""What one look of `unirl doctor` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Check", "Status"]

Status = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    remedy: str = ""
    """What to do; empty when it is well."""
