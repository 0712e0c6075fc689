"""The error tree of the store. Each error also is the built-in that a caller would expect to catch."""

from __future__ import annotations

__all__ = [
    "ColumnError",
    "ColumnTypeError",
    "CommitConflictError",
    "CorruptionError",
    "DuplicateKeyError",
    "FormatVersionError",
    "KeyNotFoundError",
    "ManifestError",
    "MissingShardError",
    "QueryError",
    "RowNotFoundError",
    "SnapshotNotFoundError",
    "StorageError",
    "StorageFullError",
    "StoreExistsError",
    "StoreNotFoundError",
    "TensorColumnError",
]


class StorageError(OSError):
    """Root of every error that `storage` raises on purpose."""


class StorageFullError(StorageError):
    """The disk, or a limit on files, leaves no room for what was to be written."""


class StoreNotFoundError(StorageError, FileNotFoundError):
    """The path holds no store."""


class StoreExistsError(StorageError, FileExistsError):
    """The path already holds a store, or files that are not ours."""


class FormatVersionError(StorageError):
    """The store was written in a format that this version does not read."""


class SnapshotNotFoundError(StorageError, LookupError):
    """The store has no snapshot of that number."""


class ManifestError(StorageError, ValueError):
    """A snapshot file that is damaged, or that asks for something a store never holds."""


class MissingShardError(StorageError, FileNotFoundError):
    """A file that the snapshot lists is not there."""


class CorruptionError(StorageError):
    """A file that is shorter, longer or other than the snapshot says."""


class CommitConflictError(StorageError):
    """Another writer changed the store in a way that this commit cannot be put on top of."""


class KeyNotFoundError(StorageError, KeyError):
    """No row of this snapshot has the key."""


class RowNotFoundError(StorageError, IndexError):
    """No row of this snapshot has the number."""


class DuplicateKeyError(StorageError, ValueError):
    """A key that the store or the same commit already has."""


class ColumnError(StorageError, ValueError):
    """A column name that is unknown, reserved, or cannot be used."""


class ColumnTypeError(StorageError, TypeError):
    """A value of another type than its column has."""


class TensorColumnError(StorageError, ValueError):
    """A tensor of the wrong dtype or shape, or one that is missing."""


class QueryError(StorageError, ValueError):
    """SQL that cannot be run, or that does more than read the samples."""
