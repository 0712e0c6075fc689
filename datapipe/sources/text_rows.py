"""Put samples of text together and apart: a million prompts are a matter of seconds by the column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from datapipe.sources.record import Item, Record, TextRows

__all__ = ["gathered", "one_by_one"]

_MAX_ROWS: Final = 2048


def one_by_one(items: Iterable[Item | TextRows]) -> Iterator[Item]:
    """All records by themselves."""
    for item in items:
        if isinstance(item, TextRows):
            yield from item.records()
        else:
            yield item


def gathered(items: Iterable[Item | TextRows]) -> Iterator[Item | TextRows]:
    """Put consecutive records of text alone together; all else passes as it is, in its order."""
    waiting: list[Record] = []
    for item in items:
        is_text = isinstance(item, Record) and item.load is None and not item.parts
        if waiting and not (is_text and _is_alike(waiting[0], item) and len(waiting) < _MAX_ROWS):
            yield _joined(waiting)
            waiting = []
        if isinstance(item, Record) and is_text:
            waiting.append(item)
        else:
            yield item
    if waiting:
        yield _joined(waiting)


def _is_alike(first: Record, item: Item | TextRows) -> bool:
    return (
        isinstance(item, Record)
        and item.columns.keys() == first.columns.keys()
        and item.optional == first.optional
    )


def _joined(records: list[Record]) -> Record | TextRows:
    if len(records) == 1:
        return records[0]
    return TextRows(
        keys=[record.key for record in records],
        places=[record.place for record in records],
        captions=[record.caption for record in records],
        columns={name: [record.columns[name] for record in records] for name in records[0].columns},
        optional=records[0].optional,
    )
