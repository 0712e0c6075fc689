"""A versioned, queryable feature store: LMDB blobs, mapped Arrow tensors, a Parquet index, snapshots.

What a program that only reads does not need, writing, checks, other formats, is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from storage.column import TensorColumn
from storage.errors import (
    ColumnError,
    ColumnTypeError,
    CommitConflictError,
    CorruptionError,
    DuplicateKeyError,
    FormatVersionError,
    KeyNotFoundError,
    ManifestError,
    MissingShardError,
    QueryError,
    RowNotFoundError,
    SnapshotNotFoundError,
    StorageError,
    StorageFullError,
    StoreExistsError,
    StoreNotFoundError,
    TensorColumnError,
)
from storage.history import SnapshotDiff
from storage.manifest import ModelRecord, Snapshot
from storage.shards import Counters
from storage.store import FeatureStore
from storage.view import View

if TYPE_CHECKING:
    from storage.exchange import ExportReport
    from storage.garbage import GcReport
    from storage.integrity import Problem, VerifyReport
    from storage.part_writer import PartWriter
    from storage.repair import LostRow, RepairReport, repair_store
    from storage.sealed import SealedPart
    from storage.writer import Writer

__all__ = [
    "ColumnError",
    "ColumnTypeError",
    "CommitConflictError",
    "CorruptionError",
    "Counters",
    "DuplicateKeyError",
    "ExportReport",
    "FeatureStore",
    "FormatVersionError",
    "GcReport",
    "KeyNotFoundError",
    "LostRow",
    "ManifestError",
    "MissingShardError",
    "ModelRecord",
    "PartWriter",
    "Problem",
    "QueryError",
    "RepairReport",
    "RowNotFoundError",
    "SealedPart",
    "Snapshot",
    "SnapshotDiff",
    "SnapshotNotFoundError",
    "StorageError",
    "StorageFullError",
    "StoreExistsError",
    "StoreNotFoundError",
    "TensorColumn",
    "TensorColumnError",
    "VerifyReport",
    "View",
    "Writer",
    "repair_store",
]

_LOADED_ON_USE: Final = {
    "ExportReport": "storage.exchange",
    "GcReport": "storage.garbage",
    "LostRow": "storage.repair",
    "PartWriter": "storage.part_writer",
    "Problem": "storage.integrity",
    "RepairReport": "storage.repair",
    "SealedPart": "storage.sealed",
    "VerifyReport": "storage.integrity",
    "Writer": "storage.writer",
    "repair_store": "storage.repair",
}


def __getattr__(name: str) -> object:
    if name not in _LOADED_ON_USE:
        raise AttributeError(f"module 'storage' has no attribute {name!r}")
    found: object = getattr(import_module(_LOADED_ON_USE[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
