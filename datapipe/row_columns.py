"""Keys and metadata of the rows of a batch, read shard by shard when a row of it first comes up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage import View
from storage.arrow_numpy import pick_list
from storage.columns import ARROW_TYPES

__all__ = ["RowColumns"]


class RowColumns:
    """Nothing is read when it is made. Keys are read from the maps of the shards and take no memory.

    Columns are held as Arrow arrays of those rows of a shard that are in the view.
    """

    def __init__(self, view: View, columns: Sequence[str]) -> None:
        self._store = view.store
        self._rows = view.rows
        self.names = tuple(columns)
        self._sorted: NDArray[np.int64] | None = None
        self._parts: dict[int, tuple[int, dict[str, pa.Array]]] = {}

    def keys(self, rows: NDArray[np.int64]) -> list[str]:
        """The keys of rows of the view."""
        found = [""] * len(rows)
        for part, local, places in self._by_part(rows):
            keys = self._store.part(part).keys(self._store.policy).keys(local)
            if places is None:
                return keys
            for place, key in zip(places.tolist(), keys):
                found[place] = key
        return found

    def values(self, rows: NDArray[np.int64]) -> dict[str, list[Any]]:
        """Column name -> the values of rows of the view; None where a row has none."""
        found: dict[str, list[Any]] = {name: [None] * len(rows) for name in self.names}
        if not found:
            return found
        for part, _, places in self._by_part(rows):
            first, arrays = self._part(part)
            at = self._ascending().searchsorted(rows if places is None else rows[places]) - first
            for name, array in arrays.items():
                values = pick_list(array, at)
                if places is None:
                    found[name] = values
                    continue
                column = found[name]
                for place, value in zip(places.tolist(), values):
                    column[place] = value
        return found

    def _by_part(
        self, rows: NDArray[np.int64]
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64] | None]]:
        """Each part, the rows in it that are wanted, and their places in `rows`; None where that is all."""
        parts, local = self._store.row_map.locate(rows)
        if len(rows) and parts[0] == parts[-1] and bool((parts == parts[0]).all()):
            yield int(parts[0]), local, None
            return
        order = np.argsort(parts, kind="stable")
        ends = np.flatnonzero(np.diff(parts[order])) + 1
        for places in np.split(order, ends) if len(rows) else ():
            yield int(parts[places[0]]), local[places], places

    def _part(self, part: int) -> tuple[int, dict[str, pa.Array]]:
        """Where the rows of a part begin among the ascending rows of the view, and their columns."""
        held = self._parts.get(part)
        if held is None:
            record, rows = self._store.snapshot.parts[part], self._ascending()
            first, end = np.searchsorted(rows, [record.first_row, record.end_row]).tolist()
            is_whole = end - first == record.rows
            view = View(self._store, rows[first:end])
            held = self._parts[part] = (
                first,
                {name: self._column(part, view, name, is_whole=is_whole) for name in self.names},
            )
            pa.default_memory_pool().release_unused()
        return held

    def _column(self, part: int, view: View, name: str, *, is_whole: bool) -> pa.Array:
        spec = self._store.snapshot.columns.get(name)
        if not is_whole or spec is None:
            return view.column(name)
        # As the store holds it, without the copy that picking rows costs.
        return self._store.part(part).column(name, ARROW_TYPES[spec.type], self._store.policy)

    def _ascending(self) -> NDArray[np.int64]:
        if self._sorted is None:
            is_sorted = bool((self._rows[1:] > self._rows[:-1]).all())
            self._sorted = self._rows if is_sorted else np.unique(self._rows)
        return self._sorted
