"""Adding rows to a store, and changing its columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from storage.handle import StoreHandle
from storage.manifest import Snapshot, TensorSpec
from storage.snapshots import check_publishable
from storage.tensors import tensor_spec

if TYPE_CHECKING:
    from storage.part_writer import PartWriter
    from storage.sealed import SealedPart
    from storage.writer import Writer

__all__ = ["Writing"]


class Writing(StoreHandle):
    """The part of a store handle that begins commits. They go on top of the newest snapshot."""

    def writer(
        self,
        *,
        message: str = "",
        tensors: Mapping[str, tuple[np.typing.DTypeLike, Sequence[int]]] | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> Writer:
        """Begin a commit of new rows on top of the newest snapshot.

        Args:
            message: Kept in the snapshot.
            tensors: Tensor columns that every row will have: name -> (dtype, shape of one row).
            columns: Types of metadata columns to be fixed beforehand: name -> string, int, float, bool or
                json.
        """
        from storage.writer import Writer

        check_publishable(self.url, replace(self.snapshot, message=message))
        return Writer(self._pool, message=message, tensors=_specs(tensors), columns=columns or {})

    def part_writer(
        self,
        *,
        tensors: Mapping[str, tuple[np.typing.DTypeLike, Sequence[int]]] | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> PartWriter:
        """Begin a part that another process may publish. Takes the arguments of `writer`.

        Workers, on this machine or others that see the folder, each write parts; `publish_parts` commits all
        of them at once. A part that nobody publishes is removed by gc after its grace period.
        """
        from storage.part_writer import PartWriter

        return PartWriter(self._pool, tensors=_specs(tensors), columns=columns or {})

    def publish_parts(self, parts: Iterable[SealedPart], message: str = "append") -> Snapshot:
        """Commit parts that were sealed by part writers in one snapshot, in the order given, or none of them.

        Raises:
            DuplicateKeyError: If two parts, or a part and the store, have the same key; names both places.
            ColumnError, ColumnTypeError, TensorColumnError: If the columns of two parts, or of a part and the
                store, do not fit each other.
            CommitConflictError: If a part is given twice or was published before.
            MissingShardError: If a part is gone. After an error the parts that are left can be published.
        """
        from storage.sealed import publish_parts

        return publish_parts(self._pool, list(parts), message)

    def append(self, rows: Iterable[Mapping[str, Any]], message: str = "append") -> Snapshot:
        """Commit rows given as mappings: "key", optional "blob" and "tensors", any columns."""
        with self.writer(message=message) as writer:
            for row in rows:
                writer.add(**row)
        assert writer.snapshot is not None
        return writer.snapshot

    def drop_column(self, name: str, message: str = "") -> Snapshot:
        """Publish a snapshot without a metadata or tensor column. The name may then be used for another type.

        Raises:
            ColumnError: If there is no such column.
        """
        from storage.schema_change import drop_column

        return drop_column(self._pool, name, message or f"drop column {name}")

    def rename_column(self, name: str, new_name: str, message: str = "") -> Snapshot:
        """Publish a snapshot in which a metadata or tensor column has another name.

        Raises:
            ColumnError: If there is no such column, or the new name is taken or cannot be used.
        """
        from storage.schema_change import rename_column

        return rename_column(self._pool, name, new_name, message or f"rename column {name} to {new_name}")


def _specs(
    tensors: Mapping[str, tuple[np.typing.DTypeLike, Sequence[int]]] | None,
) -> dict[str, TensorSpec]:
    return {name: tensor_spec(name, dtype, tuple(shape)) for name, (dtype, shape) in (tensors or {}).items()}
