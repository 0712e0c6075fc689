"""One row of a table file, and the check that all of them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from datapipe.errors import SourceError

__all__ = ["Row", "check_unique_names", "repeated_name"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Values of one row by column name, as the file has them."""

    place: str  # "rows.csv:17" (line) or "rows.parquet#3" (row)
    number: int  # 1-based position among the rows of the file
    values: dict[str, object]


def repeated_name(names: Sequence[str]) -> tuple[str, int, int] | None:
    """Find the first name that stands twice; positions are 1-based."""
    seen: dict[str, int] = {}
    for position, name in enumerate(names, start=1):
        if name in seen:
            return name, seen[name], position
        seen[name] = position
    return None


def check_unique_names(names: Sequence[str], place: str) -> None:
    """Refuse a table in which a look-up by name would pick one of two columns.

    Raises:
        SourceError: Naming the column and both positions.
    """
    repeated = repeated_name(names)
    if repeated is not None:
        name, first, second = repeated
        raise SourceError(
            f"{place}: columns {first} and {second} are both named {name!r}; rename or drop one of them"
        )
