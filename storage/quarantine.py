"""Records of what was refused. They are only added to: one that was settled gets a record that says so."""

from __future__ import annotations

import pyarrow as pa

__all__ = ["RESOLVED", "open_records"]

RESOLVED = "resolved"
"""Reason of a record that settles all earlier ones of its place."""


def open_records(table: pa.Table) -> pa.Table:
    """The records, in the order in which they were written, that no later one settles."""
    places: list[str] = table.column("place").to_pylist()
    is_mark = [reason == RESOLVED for reason in table.column("reason").to_pylist()]
    if not any(is_mark):
        return table
    settled_at = {place: at for at, place in enumerate(places) if is_mark[at]}
    keep = [not is_mark[at] and at > settled_at.get(place, -1) for at, place in enumerate(places)]
    return table.filter(pa.array(keep, pa.bool_()))
