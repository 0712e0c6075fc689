"""A view: some rows of one snapshot in some order, as an array of row numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from storage.arrow_numpy import from_numpy
from storage.columns import ARROW_TYPES
from storage.errors import ColumnError
from storage.index import OWN_COLUMNS

if TYPE_CHECKING:
    from storage.store import FeatureStore

__all__ = ["View"]


class View:
    """Rows of a store. Small, picklable, and the same for ever: later commits do not change it.

    rows: int64 (n,), global row numbers.
    """

    __slots__ = ("rows", "store")

    def __init__(self, store: FeatureStore, rows: np.ndarray) -> None:
        self.store = store
        self.rows = np.ascontiguousarray(rows, np.int64)

    @property
    def snapshot_id(self) -> int:
        """The snapshot that the rows belong to."""
        return self.store.snapshot.id

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: slice | np.ndarray | Sequence[int]) -> View:
        if not isinstance(index, slice):
            index = np.asarray(index) if len(index) else np.empty(0, np.int64)
        return View(self.store, self.rows[index])

    def __repr__(self) -> str:
        return f"View({len(self)} rows of {self.store.url}, snapshot {self.snapshot_id})"

    def __reduce__(self) -> tuple[Any, ...]:
        return View, (self.store, self.rows)

    def keys(self) -> list[str]:
        """The key of each row."""
        return [self.store.key(row) for row in self.rows.tolist()]

    def column(self, name: str) -> pa.Array:
        """One metadata column, aligned with `rows`; null where a row has no value.

        Raises:
            ColumnError: If the store has no such column; names the nearest.
        """
        if name == "row":
            return from_numpy(self.rows)
        kind = self._type(name)
        part_of, local = self.store.row_map.locate(self.rows)
        pieces: list[pa.Array] = []
        positions: list[np.ndarray] = []
        for part in np.flatnonzero(np.bincount(part_of)).tolist():
            mine = np.flatnonzero(part_of == part)
            pieces.append(self.store.part(part).column(name, kind, self.store.policy, local[mine]))
            positions.append(mine)
        if not pieces:
            return pa.nulls(0, kind)
        if len(pieces) == 1:
            return pieces[0]
        order = np.empty(len(self), np.int64)
        order[np.concatenate(positions)] = np.arange(len(self))
        return pa.concat_arrays(pieces).take(from_numpy(order))

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Metadata columns as a table; None for all of them."""
        names = list(self.store.columns) if columns is None else list(columns)
        return pa.table({name: self.column(name) for name in names})

    def _type(self, name: str) -> pa.DataType:
        if name in OWN_COLUMNS:
            return OWN_COLUMNS[name]
        spec = self.store.snapshot.columns.get(name)
        if spec is None:
            raise ColumnError(self.store.unknown_column(name))
        return ARROW_TYPES[spec.type]
