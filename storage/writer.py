"""One commit of new rows: everything is streamed to staging, then published as one snapshot or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType

import numpy as np

from storage.blobs import Blob
from storage.columns import ColumnTypes, check_same_types
from storage.errors import (
    ColumnError,
    ColumnTypeError,
    CommitConflictError,
    DuplicateKeyError,
    StorageError,
    TensorColumnError,
)
from storage.index import QuarantineWriter
from storage.keys import encode_key, hash_key
from storage.manifest import ColumnSpec, FileRef, Part, Snapshot, TensorSpec
from storage.part_builder import PartBuilder
from storage.shards import ReaderPool
from storage.snapshots import newest_snapshot, publish
from storage.staging import Staging
from storage.tensors import tensor_spec

__all__ = ["Writer"]

_REFUSALS = (DuplicateKeyError, ColumnError, ColumnTypeError, TensorColumnError, CommitConflictError)


class Writer:
    """Adds rows in one commit; made by `FeatureStore.writer`, used in a `with` block.

    Nothing is visible until the block ends without an error. `snapshot` is what was published.
    Memory holds a few chunks of each column and about 100 bytes a row.
    """

    def __init__(
        self,
        readers: ReaderPool,
        *,
        message: str,
        tensors: Mapping[str, TensorSpec],
        columns: Mapping[str, str],
    ) -> None:
        self.snapshot: Snapshot | None = None
        self._backend = readers.backend
        self._readers = readers
        self._message = message
        self._base = newest_snapshot(self._backend)
        self._known = readers.key_index(self._base.parts, "first-read")
        self._deleted = readers.deleted_rows(self._base)
        self._types = ColumnTypes(_origins(self._base), columns)
        for name, spec in tensors.items():
            _check_tensor_spec(name, spec, self._base)
        self._staging = Staging(self._backend)
        self._rows = PartBuilder(self._staging, self._staging.id, self._types.types)
        for name, spec in tensors.items():
            self._rows.add_tensor(name, spec)
        self._quarantine: QuarantineWriter | None = None
        self._tensors_fixed = bool(tensors)
        self._usable = True

    def __len__(self) -> int:
        """Rows added so far."""
        return len(self._rows)

    def add(
        self,
        key: str,
        blob: Blob | None = None,
        tensors: Mapping[str, np.ndarray] | None = None,
        **columns: object,
    ) -> None:
        """Add one row. An error leaves the commit as it was before the call.

        Args:
            key: Text of any length, unique in the store.
            blob: Encoded bytes, stored as they are.
            tensors: One array for every tensor column of this commit. Without a declaration the first row
                sets them.
            columns: Text, int, float, bool or None; anything else is kept as JSON text.

        Raises:
            DuplicateKeyError: If the store or this commit has the key; names both places.
            ColumnError, ColumnTypeError: If a name or a value does not fit.
            TensorColumnError: If a tensor is missing, unknown, or of another dtype or shape.
        """
        if not self._usable:
            raise StorageError(
                f"{self._backend.url}: this writer is closed or failed before; begin a new commit"
            )
        row = len(self)
        place = f"row {row} of the commit, key {key!r}"
        encoded = encode_key(key)
        key_hash = hash_key(encoded)
        self._refuse_duplicate(key, encoded, key_hash, place)
        arrays = self._checked_tensors(tensors or {}, place)
        values = {name: self._types.accept(name, value, place) for name, value in columns.items()}
        self._usable = False
        self._rows.add(encoded, key_hash, blob, values)
        for name, data in arrays.items():
            self._rows.tensors[name].append(data)
        self._usable = True

    def quarantine(self, *, key: str, place: str, reason: str, data: bytes | None = None) -> None:
        """Record what was refused, with its bytes; published with the rows."""
        if self._quarantine is None:
            self._quarantine = QuarantineWriter(self._staging.path / "quarantine.parquet")
        self._quarantine.add(key, place, reason, data)

    def _refuse_duplicate(self, key: str, encoded: bytes, key_hash: int, place: str) -> None:
        mine = self._rows.keys.find(encoded, key_hash)
        if mine is not None:
            raise DuplicateKeyError(
                f"{place}: row {mine} of the same commit has this key; give each row a key of its own"
            )
        theirs = self._known.find(key, self._deleted)
        if theirs is not None:
            raise DuplicateKeyError(
                f"{place}: row {theirs} of {self._backend.url} (snapshot {self._base.id}) has this key; "
                "leave it out, or give it another key"
            )

    def _checked_tensors(self, tensors: Mapping[str, np.ndarray], place: str) -> dict[str, memoryview]:
        if not self._tensors_fixed:
            if len(self) == 0:
                specs = {name: tensor_spec(name, array.dtype, array.shape) for name, array in tensors.items()}
                for name, spec in specs.items():
                    _check_tensor_spec(name, spec, self._base)
                    self._rows.add_tensor(name, spec)
            self._tensors_fixed = True
        if tensors.keys() != self._rows.tensors.keys():
            raise TensorColumnError(
                f"{place}: tensors {sorted(tensors)}, every row of this commit has "
                f"{sorted(self._rows.tensors)}; "
                "write rows with other tensors in another commit"
            )
        return {name: self._rows.tensors[name].check(array, place) for name, array in tensors.items()}

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._close()

    def _commit(self) -> None:
        if not self._usable:
            raise StorageError(
                f"{self._backend.url}: an earlier error left a row half written; nothing was committed"
            )
        if len(self) == 0 and self._quarantine is None:
            self.snapshot = self._base
            return
        part = self._rows.seal() if len(self) else None
        refused = self._seal_quarantine()
        self._staging.flush()
        try:
            self.snapshot = publish(self._backend, lambda newest: self._on_top_of(newest, part, refused))
        except _REFUSALS:
            self._staging.withdraw()
            raise

    def _seal_quarantine(self) -> tuple[FileRef, ...]:
        if self._quarantine is None:
            return ()
        self._quarantine.close()
        name = f"quarantine/part-{self._staging.id}.parquet"
        return (self._staging.install(self._quarantine.path, name, self._quarantine.rows),)

    def _on_top_of(self, newest: Snapshot, part: Part | None, refused: tuple[FileRef, ...]) -> Snapshot:
        if part is None:
            return replace(newest, message=self._message, quarantine=newest.quarantine + refused)
        self._refuse_conflicts(newest)
        mine = self._types.types()
        placed = replace(part, first_row=newest.next_row, end_row=newest.next_row + part.rows)
        columns = dict(newest.columns)
        for name, kind in mine.items():
            if name not in columns or columns[name].type == "null":
                columns[name] = ColumnSpec(type=kind, since=part.id)
        specs = {name: spool.spec for name, spool in self._rows.tensors.items()}
        return replace(
            newest,
            message=self._message,
            num_rows=newest.num_rows + part.rows,
            next_row=newest.next_row + part.rows,
            columns=columns,
            tensors={**newest.tensors, **specs},
            parts=(*newest.parts, placed),
            quarantine=newest.quarantine + refused,
        )

    def _refuse_conflicts(self, newest: Snapshot) -> None:
        if newest.id == self._base.id:
            return
        seen = {part.id for part in self._base.parts}
        for part in newest.parts:
            if part.id not in seen:
                self._refuse_shared_keys(newest, part)
        mine = {name: (kind, f"commit {self._staging.id}") for name, kind in self._types.types().items()}
        check_same_types(mine, _origins(newest))
        for name, spool in self._rows.tensors.items():
            _check_tensor_spec(name, spool.spec, newest)

    def _refuse_shared_keys(self, newest: Snapshot, part: Part) -> None:
        reader = self._readers.get(part)
        table = reader.keys("first-read")
        deleted = self._readers.deleted_rows(newest)
        hashes = self._rows.keys.hashes()
        for shared in table.shared_hashes(hashes).tolist():
            for row in np.flatnonzero(hashes == shared).tolist():
                key = self._rows.keys.key(row)
                local = table.find(key, shared)
                if local is None:
                    continue
                other = int(reader.global_rows(np.array([local]))[0])
                if not np.isin(other, deleted):
                    raise DuplicateKeyError(
                        f"row {row} of the commit, key {key.decode()!r}: another writer published it "
                        "meanwhile as row "
                        f"{other} of {self._backend.url} (snapshot {newest.id}); nothing "
                        "was committed"
                    )

    def _close(self) -> None:
        self._usable = False
        self._rows.close()
        self._staging.close()


def _check_tensor_spec(name: str, spec: TensorSpec, snapshot: Snapshot) -> None:
    known = snapshot.tensors.get(name)
    if known is not None and known != spec:
        raise TensorColumnError(
            f"tensor column {name!r} is {spec.dtype}{spec.shape} in this commit, but "
            f"{known.dtype}{known.shape} in "
            f"snapshot {snapshot.id}; convert it, or use another name"
        )


def _origins(snapshot: Snapshot) -> dict[str, tuple[str, str]]:
    """Column -> type and where it was set, as text for errors."""
    rows = {part.id: part.first_row for part in snapshot.parts}
    return {
        name: (spec.type, f"part {spec.since}" + (f" (row {rows[spec.since]})" if spec.since in rows else ""))
        for name, spec in snapshot.columns.items()
    }
