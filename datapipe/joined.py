"""Several stores read as one, for mixtures of views that lie in different stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from datapipe.errors import LoaderError
from datapipe.row_columns import RowColumns
from storage import FeatureStore, TensorColumn, TensorColumnError, View

__all__ = ["JoinedStore", "JoinedTensor", "JoinedView", "RowReader", "join_views", "reader_of"]

_ROWS_OF_A_STORE: Final = 2**40


class JoinedView:
    """Rows of several stores in some order.

    rows: int64 (n,), number of the store x 2^40 + row in the store.
    """

    __slots__ = ("rows", "store")

    def __init__(self, store: JoinedStore, rows: NDArray[np.int64]) -> None:
        self.store = store
        self.rows = np.ascontiguousarray(rows, np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"JoinedView({len(self)} rows of {self.store.url})"

    def locate(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where rows lie, such as those of a batch: places of stores in `store.stores`, and rows in these."""
        numbers, local = np.divmod(rows, _ROWS_OF_A_STORE)
        return numbers, local


class JoinedStore:
    """What a loader reads of a store, of several of them."""

    def __init__(self, stores: Sequence[FeatureStore]) -> None:
        """Args:
        stores: Opened for reading, different snapshots each.

        Raises:
            LoaderError: If a metadata column is of one type here and of another there.
        """
        self.stores = tuple(stores)
        self.url = " and ".join(store.url for store in stores)
        self.counters = _JoinedCounters(self.stores)
        self.columns: dict[str, str] = {}
        for store in stores:
            for name, kind in store.columns.items():
                known = self.columns.setdefault(name, kind)
                if known != kind:
                    raise LoaderError(
                        f"column {name!r} is {kind} in {store.url}, and {known} in a store before it; rename "
                        f"it in one of them"
                    )

    @cached_property
    def tensor_columns(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Those that all stores have, of one dtype and shape."""
        first, *others = [store.tensor_columns for store in self.stores]
        return {name: kind for name, kind in first.items() if all(o.get(name) == kind for o in others)}

    def tensor(self, name: str) -> JoinedTensor:
        """A tensor column that all stores have."""
        return JoinedTensor([store.tensor(name) for store in self.stores])

    def blob(self, row: int) -> memoryview:
        """See FeatureStore.blob."""
        number, local = divmod(row, _ROWS_OF_A_STORE)
        return self.stores[number].blob(local)


class JoinedTensor:
    """One tensor column of several stores; see TensorColumn."""

    def __init__(self, columns: Sequence[TensorColumn]) -> None:
        self.name, self.dtype, self.shape = columns[0].name, columns[0].dtype, columns[0].shape
        self._columns = tuple(columns)

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        number, start = divmod(rows.start, _ROWS_OF_A_STORE)
        last_number, last = divmod(rows.stop - 1, _ROWS_OF_A_STORE)
        if last_number != number:
            raise TensorColumnError(f"tensor {self.name!r}: the rows lie in more than one store; use gather")
        view: NDArray[Any] = self._columns[number][start : last + 1]
        return view

    def row(self, row: int) -> NDArray[Any]:
        number, local = divmod(row, _ROWS_OF_A_STORE)
        return self._columns[number].row(local)

    def gather(self, rows: NDArray[np.int64], out: NDArray[Any]) -> NDArray[Any]:
        for number, places, local in _by_store(rows):
            self._columns[number].gather(local, out, places=places if len(places) < len(rows) else None)
        return out

    def has(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        found = np.empty(len(rows), np.bool_)
        for number, places, local in _by_store(rows):
            found[places] = self._columns[number].has(local)
        return found


def join_views(views: Sequence[View]) -> View | JoinedView:
    """The views one after the other: a view where all are of one snapshot, else one of several stores.

    Raises:
        LoaderError: If a metadata column is of one type here and of another there.
    """
    stores = {(view.store.url, view.snapshot_id): view.store for view in views}
    if len(stores) == 1:
        return View(views[0].store, np.concatenate([view.rows for view in views]))
    numbers = {place: number for number, place in enumerate(stores)}
    rows = [view.rows + numbers[view.store.url, view.snapshot_id] * _ROWS_OF_A_STORE for view in views]
    return JoinedView(JoinedStore(list(stores.values())), np.concatenate(rows))


def reader_of(view: View | JoinedView, columns: Sequence[str]) -> RowReader:
    """What reads keys and metadata of the rows of a view."""
    return RowColumns(view, columns) if isinstance(view, View) else _JoinedColumns(view, columns)


class _JoinedColumns:
    """See RowColumns. A store that lacks a column gives None."""

    def __init__(self, view: JoinedView, columns: Sequence[str]) -> None:
        self.names = tuple(columns)
        numbers, local = view.locate(view.rows)
        self._readers = [
            RowColumns(
                View(store, local[numbers == number]), [name for name in columns if name in store.columns]
            )
            for number, store in enumerate(view.store.stores)
        ]

    def keys(self, rows: NDArray[np.int64]) -> list[str]:
        found = [""] * len(rows)
        for number, places, local in _by_store(rows):
            _put(found, places, self._readers[number].keys(local))
        return found

    def values(self, rows: NDArray[np.int64]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {name: [None] * len(rows) for name in self.names}
        for number, places, local in _by_store(rows):
            for name, values in self._readers[number].values(local).items():
                _put(found[name], places, values)
        return found


class _JoinedCounters:
    """See Counters: the sums over the stores."""

    def __init__(self, stores: Sequence[FeatureStore]) -> None:
        self._stores = stores

    @property
    def bytes_read(self) -> int:
        return sum(store.counters.bytes_read for store in self._stores)

    @property
    def bytes_copied(self) -> int:
        return sum(store.counters.bytes_copied for store in self._stores)


def _by_store(rows: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Each store of which there are rows, their places in `rows`, and their numbers in the store."""
    numbers, local = np.divmod(rows, _ROWS_OF_A_STORE)
    for number in np.unique(numbers).tolist():
        places = np.flatnonzero(numbers == number)
        yield number, places, local[places]


def _put(found: list[Any], places: NDArray[np.int64], values: list[Any]) -> None:
    for place, value in zip(places.tolist(), values):
        found[place] = value


RowReader = RowColumns | _JoinedColumns
