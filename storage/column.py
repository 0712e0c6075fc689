"""A tensor column of a store: views without a copy, gathers with one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from storage.errors import RowNotFoundError, TensorColumnError
from storage.manifest import ModelRecord, TensorSpec
from storage.row_copy import copy_rows
from storage.tensor_shard import TensorShard
from storage.view import View

if TYPE_CHECKING:
    from storage.store import FeatureStore

__all__ = ["TensorColumn"]


class TensorColumn:
    """Rows of one fixed-shape tensor column, of which some may have no value.

    dtype: numpy dtype.  shape: of one row.
    """

    def __init__(self, store: FeatureStore, name: str, spec: TensorSpec) -> None:
        self.name = name
        self.dtype = np.dtype(spec.dtype)
        self.shape = spec.shape
        self._store = store
        self._spec = spec
        self._row_bytes = spec.row_bytes
        self._shards: dict[int, TensorShard] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorColumn, (self._store, self.name, self._spec)

    def __repr__(self) -> str:
        return f"TensorColumn({self.name!r}, {self.dtype}{self.shape})"

    @property
    def model(self) -> ModelRecord | None:
        """What computed the column, as `add_column` was told."""
        return self._spec.model

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Consecutive rows (stop - start, *shape) as a view of the file: nothing is copied.

        The view is a private map. Writing to it changes neither the file nor what anyone else reads.

        Raises:
            TensorColumnError: If the rows lie in more than one shard, or one has no value; use gather.
        """
        if (
            not isinstance(rows, slice)
            or rows.step not in (None, 1)
            or rows.start is None
            or rows.stop is None
        ):
            raise TensorColumnError(
                f"tensor {self.name!r}: a view is column[start:stop]; for other rows use gather"
            )
        if not 0 <= rows.start <= rows.stop:
            raise RowNotFoundError(
                f"tensor {self.name!r}: rows {rows.start}:{rows.stop} do not count upwards from 0"
            )
        if rows.start == rows.stop:
            return np.empty((0, *self.shape), self.dtype)
        wanted = np.arange(rows.start, rows.stop)
        parts, local = self._store.row_map.locate(wanted)
        if parts[0] != parts[-1] or local[-1] - local[0] != len(local) - 1:
            raise TensorColumnError(
                f"tensor {self.name!r}: rows {rows.start} to {rows.stop - 1} lie in more than one "
                "shard; use gather"
            )
        at = self._positions(int(parts[0]), local)
        if (at < 0).any():
            raise self._no_value(int(wanted[at.argmin()]))
        shard = self._shard(int(parts[0]))
        start, stop = int(at[0]), int(at[-1]) + 1
        # First the map, which compares the file: one that was truncated meanwhile must not be looked at.
        view = shard.private(start, stop)
        shard.check(slice(start, stop), self._store.policy)
        self._store.counters.bytes_read += (stop - start) * self._row_bytes
        return view

    def row(self, row: int) -> np.ndarray:
        """One row, copied, of the column's shape. For many rows `gather` is faster.

        Raises:
            RowNotFoundError: If the row does not exist.
            TensorColumnError: If it has no value.
        """
        store = self._store
        part, at = store.row_map.locate_one(row)
        shard = self._shards.get(part)
        if shard is None or shard.present is not None:
            at = int(self._positions(part, np.array([at]))[0])
            if at < 0:
                raise self._no_value(row)
            shard = self._shard(part)
        shard.check_row(at, store.policy)
        counters, num_bytes = store.counters, self._row_bytes
        counters.bytes_read += num_bytes
        counters.bytes_copied += num_bytes
        return np.array(shard.array[at])

    def gather(
        self,
        rows: np.ndarray,
        out: np.ndarray | None = None,
        *,
        fill: float | None = None,
        places: np.ndarray | None = None,
    ) -> np.ndarray:
        """Rows in any order, each copied once from the map into the result.

        Args:
            rows: Integer (n,), global row numbers; may repeat.
            out: Array (n, *shape) of the column's dtype, C-contiguous, to be filled and returned.
            fill: What stands everywhere in a row that has no value; None makes such a row an error.
            places: Integer (n,), where the rows go in an `out` of more rows; the others are left alone. None
                fills it in order.

        Raises:
            RowNotFoundError: If a row does not exist.
            TensorColumnError: If `out` does not fit, a row has no value, or the dtype cannot hold `fill`.
        """
        rows = np.asarray(rows)
        out = self._output(len(rows) if places is None or out is None else len(out), out)
        filler = None if fill is None else self._filler(fill)
        parts, local = self._store.row_map.locate(rows)
        num_rows = len(rows)
        for part, mine in _by_part(parts):
            wanted = local[mine]
            if not self._is_dense(part):
                at = self._positions(part, wanted)
                lacking = at < 0
                if lacking.any():
                    if filler is None:
                        raise self._no_value(int(rows[mine][lacking.argmax()]))
                    listed = np.arange(len(rows))[mine]
                    lost = listed[lacking]
                    out[lost if places is None else places[lost]] = filler
                    num_rows -= len(lost)
                    mine, at = listed[~lacking], at[~lacking]
                if not len(at):
                    continue
                wanted = at
            shard = self._shard(part)
            shard.check(wanted, self._store.policy)
            copy_rows(shard.array, wanted, out, mine if places is None else places[mine])
        num_bytes = num_rows * self._row_bytes
        self._store.counters.bytes_read += num_bytes
        self._store.counters.bytes_copied += num_bytes
        return out

    def has(self, rows: np.ndarray) -> np.ndarray:
        """Whether rows have a value, bool (n,).

        Args:
            rows: Integer (n,), global row numbers.

        Raises:
            RowNotFoundError: If a row does not exist.
        """
        parts, local = self._store.row_map.locate(np.asarray(rows))
        found = np.empty(len(parts), bool)
        for part, mine in _by_part(parts):
            found[mine] = self._is_dense(part) or self._positions(part, local[mine]) >= 0
        return found

    def present(self) -> View:
        """The rows that have a value, ascending."""
        rows = self._store.row_map.live_rows()
        return View(self._store, rows[self.has(rows)])

    def _is_dense(self, part: int) -> bool:
        file = self._store.snapshot.parts[part].tensors.get(self.name)
        return file is not None and file.present is None

    def _positions(self, part: int, local: np.ndarray) -> np.ndarray:
        """Where the rows of a part lie in its file, -1 for those without a value."""
        if self.name not in self._store.snapshot.parts[part].tensors:
            return np.full(len(local), -1)
        return self._shard(part).positions(local)

    def _shard(self, part: int) -> TensorShard:
        shard = self._shards.get(part)
        if shard is None:
            shard = self._store.part(part).tensor(self.name, self._spec)
            if not self._store.backend.evicts:
                self._shards[part] = shard
        return shard

    def _no_value(self, row: int) -> TensorColumnError:
        return TensorColumnError(
            f"{self._store.url}: row {row}, key {self._store.key(row)!r}, has no tensor {self.name!r}; "
            "compute it with add_column, leave the row out (has, present), or gather with fill="
        )

    def _filler(self, fill: float) -> np.ndarray:
        with np.errstate(all="ignore"):
            filler = np.asarray(fill).astype(self.dtype)
        is_same = filler == fill or (fill != fill and filler != filler)
        if not is_same and self.dtype.kind != "f":
            raise TensorColumnError(f"tensor {self.name!r}: {self.dtype} cannot hold fill={fill!r}")
        return filler

    def _output(self, count: int, out: np.ndarray | None) -> np.ndarray:
        if out is None:
            return np.empty((count, *self.shape), self.dtype)
        if out.dtype != self.dtype or out.shape != (count, *self.shape) or not out.flags.c_contiguous:
            raise TensorColumnError(
                f"tensor {self.name!r}: out is {out.dtype}{out.shape}, wanted C-contiguous "
                f"{self.dtype}{(count, *self.shape)}"
            )
        return out


def _by_part(parts: np.ndarray) -> Iterator[tuple[int, np.ndarray | slice]]:
    """Each part in `parts` and the positions at which it stands; a slice when it stands everywhere."""
    if not len(parts):
        return
    if parts[0] == parts[-1] and (parts == parts[0]).all():
        yield int(parts[0]), slice(None)
        return
    order = np.argsort(parts, kind="stable")
    ordered = parts[order]
    ends = [*(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(parts)]
    for start, end in pairwise([0, *ends]):
        yield int(ordered[start]), order[start:end]
