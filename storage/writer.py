"""One commit of new rows: everything is streamed to staging, then published as one snapshot or not at all."""

from __future__ import annotations

from collections.abc import Mapping

from storage.errors import (
    ColumnError,
    ColumnTypeError,
    CommitConflictError,
    DuplicateKeyError,
    TensorColumnError,
)
from storage.manifest import Snapshot, TensorSpec
from storage.part_writer import PartWriter
from storage.sealed import put_on_top
from storage.shards import ReaderPool

__all__ = ["Writer"]

_REFUSALS = (DuplicateKeyError, ColumnError, ColumnTypeError, TensorColumnError, CommitConflictError)


class Writer(PartWriter):
    """Adds rows in one commit; made by `FeatureStore.writer`, used in a `with` block.

    Nothing is visible until the block ends without an error. `snapshot` is what was published.
    """

    def __init__(
        self,
        readers: ReaderPool,
        *,
        message: str,
        tensors: Mapping[str, TensorSpec],
        columns: Mapping[str, str],
    ) -> None:
        super().__init__(readers, tensors=tensors, columns=columns)
        self.snapshot: Snapshot | None = None
        self._message = message

    def _finish(self) -> None:
        if len(self) == 0 and self._quarantine is None:
            self.snapshot = self._base
            return
        self.sealed = self._seal()
        try:
            self.snapshot = put_on_top(self._readers, [self.sealed], self._message)
        except _REFUSALS:
            self._staging.withdraw()
            raise
