"""Errors of the data pipeline. Each also is the built-in that a caller would expect to catch."""

from __future__ import annotations

__all__ = [
    "DataError",
    "DecodeError",
    "LoaderError",
    "MissingExtraError",
    "SampleError",
    "SourceError",
    "StageError",
    "StoreBusyError",
    "WorkerError",
]


class DataError(ValueError):
    """Root of every error that `datapipe` raises on purpose."""


class SourceError(DataError):
    """A source that cannot be read at all: missing, unknown, or with a broken head."""


class DecodeError(DataError):
    """Bytes that do not hold a usable picture.

    Attributes:
        reason: A stable code such as `truncated`, `html` or `too_many_pixels`, used for counting.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class MissingExtraError(DataError, ImportError):
    """A package of an extra is needed and not installed. The message names the extra."""


class StoreBusyError(DataError, RuntimeError):
    """Another ingest is writing to the store. The message names it."""


class WorkerError(DataError, RuntimeError):
    """A process that worked for an ingest died again and again."""


class LoaderError(DataError):
    """A loader that cannot start, or a saved state that belongs to other data."""


class SampleError(DataError):
    """Samples failed while a batch was made: one, or more than may. The message names each key and row."""


class StageError(DataError, RuntimeError):
    """A stage of a pipeline that cannot run as declared, or a worker of it that exited, died or hung.

    Attributes:
        reason: A stable code such as `timed_out` or `died`, or the name of what a process raised.
    """

    def __init__(self, message: str, reason: str = "stage") -> None:
        super().__init__(message)
        self.reason = reason
