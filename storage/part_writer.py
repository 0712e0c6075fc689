"""Rows streamed into the files of one part, which is then sealed: complete, durable, not yet published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

import numpy as np

from storage.blobs import Blob, as_bytes
from storage.columns import ColumnTypes
from storage.disk import write_errors
from storage.errors import ColumnError, DuplicateKeyError, StorageError, TensorColumnError
from storage.index import QuarantineWriter
from storage.keys import encode_key, hash_key
from storage.manifest import ColumnSpec, FileRef, Snapshot, TensorSpec
from storage.part_builder import PartBuilder
from storage.quarantine import RESOLVED
from storage.sealed import SealedPart, check_tensor_spec, column_origins
from storage.shards import ReaderPool
from storage.snapshots import hold_newest
from storage.staging import Staging
from storage.tensors import tensor_spec

__all__ = ["PartWriter"]

_BLOCK_ROWS = 4096


class PartWriter:
    """Adds rows to one part; made by `FeatureStore.part_writer`, used in a `with` block.

    When the block ends without an error, `sealed` is the record to be handed to `FeatureStore.publish_parts`,
    in this process or another. An error in the block, or a kill, leaves nothing but files that gc removes.
    Memory holds a few chunks of each column and about 100 bytes a row.
    """

    def __init__(
        self,
        readers: ReaderPool,
        *,
        tensors: Mapping[str, TensorSpec],
        columns: Mapping[str, str],
        part_id: str | None = None,
    ) -> None:
        self.sealed: SealedPart | None = None
        self._backend = readers.backend
        self._readers = readers
        self._base, self._lease = hold_newest(self._backend)
        self._known = readers.key_index(self._base.parts, "first-read")
        self._deleted = readers.deleted_rows(self._base)
        self._types = ColumnTypes(column_origins(self._base), columns)
        for name, spec in tensors.items():
            check_tensor_spec(name, spec, self._base, "this commit")
        self._staging = Staging(self._backend, part_id)
        try:
            self._rows = self._begin(tensors)
        except StorageError:
            self._staging.close()
            raise
        self._quarantine: QuarantineWriter | None = None
        self._tensors_fixed = bool(tensors)
        self._usable = True

    def _begin(self, tensors: Mapping[str, TensorSpec]) -> PartBuilder:
        with write_errors(self._staging.path):
            rows = PartBuilder(self._staging, self._staging.id, self._types.types)
            for name, spec in tensors.items():
                rows.add_tensor(name, spec)
        return rows

    def __len__(self) -> int:
        """Rows added so far."""
        return len(self._rows)

    def add(
        self,
        /,
        key: str,
        blob: Blob | None = None,
        tensors: Mapping[str, np.ndarray | None] | None = None,
        **columns: object,
    ) -> None:
        """Add one row. An error leaves the commit as it was before the call.

        Args:
            key: Text of any length, unique in the store.
            blob: Encoded bytes, stored as they are.
            tensors: One array for every tensor column of this commit, or None where the row has no value.
                Without a declaration the first row sets them.
            columns: Text, int, float, bool or None; anything else is kept as JSON text.

        Raises:
            DuplicateKeyError: If the store or this commit has the key; names both places.
            ColumnError, ColumnTypeError: If a name or a value does not fit.
            TensorColumnError: If a tensor is missing, unknown, or of another dtype or shape.
            StorageError: If the blob is not bytes, or too long.
        """
        self._refuse_unusable()
        row = len(self)
        place = f"row {row} of the commit, key {key!r}"
        encoded = encode_key(key)
        key_hash = hash_key(encoded)
        self._refuse_duplicate(key, encoded, key_hash, lambda _: place, 0)
        content = None if blob is None else as_bytes(blob, place)
        arrays = self._checked_tensors(tensors or {}, place)
        values = {name: self._types.accept(name, value, place) for name, value in columns.items()}
        self._usable = False
        with write_errors(self._staging.path):
            self._rows.add(encoded, key_hash, content, values)
            for name, data in arrays.items():
                if data is None:
                    self._rows.tensors[name].skip(1)
                else:
                    self._rows.tensors[name].append(data)
        self._usable = True

    def add_rows(
        self,
        keys: Sequence[str],
        columns: Mapping[str, Sequence[object]],
        blobs: Sequence[Blob | None] | None = None,
    ) -> None:
        """Add rows without tensors, faster than one by one.

        An error leaves the commit as it was before the call, but for rows of earlier blocks of 4096.

        Args:
            keys: As in add.
            columns: As in add, with one value for every key.
            blobs: As in add, one for every key; None when no row has one.

        Raises:
            DuplicateKeyError, ColumnError, ColumnTypeError, StorageError: See add.
        """
        wrong = {name: len(values) for name, values in columns.items() if len(values) != len(keys)}
        if blobs is not None and len(blobs) != len(keys):
            wrong["blobs"] = len(blobs)
        if wrong:
            raise ColumnError(
                f"{len(keys)} keys, but columns of other lengths: {wrong}; give a value for each key"
            )
        for start in range(0, len(keys), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            self._add_block(
                keys[block],
                {name: values[block] for name, values in columns.items()},
                None if blobs is None else blobs[block],
            )

    def _add_block(
        self,
        keys: Sequence[str],
        columns: Mapping[str, Sequence[object]],
        blobs: Sequence[Blob | None] | None,
    ) -> None:
        self._refuse_unusable()
        first = len(self)

        def place(at: int) -> str:
            return f"row {first + at} of the commit, key {keys[at]!r}"

        encoded = [encode_key(key) for key in keys]
        hashes = [hash_key(key) for key in encoded]
        seen: dict[bytes, int] = {}
        for at, (key, code, key_hash) in enumerate(zip(keys, encoded, hashes)):
            if seen.setdefault(code, at) != at:
                raise DuplicateKeyError(
                    f"{place(at)}: row {first + seen[code]} of the same commit has this key; "
                    "give each row a key of its own"
                )
            self._refuse_duplicate(key, code, key_hash, place, at)
        contents = blobs and [
            None if blob is None else as_bytes(blob, place(at)) for at, blob in enumerate(blobs)
        ]
        values = {name: self._types.accept_all(name, given, place) for name, given in columns.items()}
        self._usable = False
        with write_errors(self._staging.path):
            self._rows.add_rows(encoded, hashes, contents, values)
            for spool in self._rows.tensors.values():
                spool.skip(len(keys))
        self._tensors_fixed = True
        self._usable = True

    def quarantine(self, *, key: str, place: str, reason: str, data: bytes | None = None) -> None:
        """Record what was refused, with its bytes; published with the rows."""
        with write_errors(self._staging.path):
            if self._quarantine is None:
                self._quarantine = QuarantineWriter(self._staging.path / "quarantine.parquet")
            self._quarantine.add(key, place, reason, data)

    def resolve(self, place: str) -> None:
        """Record that what was refused at a place is settled: a row now, or gone from its source."""
        self.quarantine(key="", place=place, reason=RESOLVED)

    def _refuse_unusable(self) -> None:
        if not self._usable:
            raise StorageError(
                f"{self._backend.url}: this writer is closed or failed before; begin a new commit"
            )

    def _refuse_duplicate(
        self, key: str, encoded: bytes, key_hash: int, place: Callable[[int], str], at: int
    ) -> None:
        mine = self._rows.keys.find(encoded, key_hash)
        if mine is not None:
            raise DuplicateKeyError(
                f"{place(at)}: row {mine} of the same commit has this key; give each row a key of its own"
            )
        theirs = self._known.find(key, self._deleted)
        if theirs is not None:
            raise DuplicateKeyError(
                f"{place(at)}: row {theirs} of {self._backend.url} (snapshot {self._base.id}) has this key; "
                "leave it out, or give it another key"
            )

    def _checked_tensors(
        self, tensors: Mapping[str, np.ndarray | None], place: str
    ) -> dict[str, memoryview | None]:
        if not isinstance(tensors, Mapping):
            raise TensorColumnError(
                f"{place}: tensors is {type(tensors).__name__}; give a mapping of column to array"
            )
        if not self._tensors_fixed:
            if len(self) == 0:
                self._fix_tensors(tensors, place)
            self._tensors_fixed = True
        if tensors.keys() != self._rows.tensors.keys():
            raise TensorColumnError(
                f"{place}: tensors {sorted(tensors)}, every row of this commit has "
                f"{sorted(self._rows.tensors)}; "
                "give None for one that the row lacks, or write it in another commit"
            )
        return {
            name: None if array is None else self._rows.tensors[name].check(array, place)
            for name, array in tensors.items()
        }

    def _fix_tensors(self, tensors: Mapping[str, np.ndarray | None], place: str) -> None:
        """Declare the tensor columns of the first row."""
        specs = {}
        for name, array in tensors.items():
            if array is None:
                raise TensorColumnError(
                    f"{place}: tensor {name!r} is None; declare dtype and shape in writer()"
                )
            if not isinstance(array, np.ndarray):
                raise TensorColumnError(
                    f"{place}: tensor {name!r} is {type(array).__name__}; convert it to a numpy array first"
                )
            specs[name] = tensor_spec(name, array.dtype, array.shape)
            check_tensor_spec(name, specs[name], self._base, "this commit")
        with write_errors(self._staging.path):
            for name, spec in specs.items():
                self._rows.add_tensor(name, spec)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with write_errors(self._staging.path):
                    self._finish()
        finally:
            self._usable = False
            self._rows.close()
            self._staging.close()

    def _finish(self) -> None:
        self.sealed = self._seal()

    def _seal(self) -> SealedPart:
        """Give the files their final names, durably."""
        if not self._usable:
            raise StorageError(
                f"{self._backend.url}: an earlier error left a row half written; nothing was committed"
            )
        part = self._rows.seal() if len(self) else None
        types = self._types.types() if part else {}
        content = Snapshot(
            id=0,
            parent=self._base.id,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            message="",
            num_rows=len(self),
            next_row=len(self),
            columns={name: ColumnSpec(type=kind, since=self._staging.id) for name, kind in types.items()},
            tensors={name: spool.spec for name, spool in self._rows.tensors.items()} if part else {},
            parts=(part,) if part else (),
            deleted=None,
            quarantine=self._seal_quarantine(),
        )
        self._staging.flush()
        return SealedPart(id=self._staging.id, content=content)

    def _seal_quarantine(self) -> tuple[FileRef, ...]:
        if self._quarantine is None:
            return ()
        self._quarantine.close()
        name = f"quarantine/part-{self._staging.id}.parquet"
        return (self._staging.install(self._quarantine.path, name, self._quarantine.rows),)
