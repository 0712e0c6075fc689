"""A versioned, queryable feature store: LMDB blobs, mapped Arrow tensors, a Parquet index, snapshots."""

from __future__ import annotations

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
from storage.exchange import ExportReport
from storage.garbage import GcReport
from storage.history import SnapshotDiff
from storage.integrity import Problem, VerifyReport
from storage.manifest import ModelRecord, Snapshot
from storage.part_writer import PartWriter
from storage.repair import LostRow, RepairReport, repair_store
from storage.sealed import SealedPart
from storage.shards import Counters
from storage.store import FeatureStore
from storage.view import View
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
