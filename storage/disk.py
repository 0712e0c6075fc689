"""Errors of writing: a full disk, with what is free and what is wanted, and a folder that is read-only."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import lmdb

from storage.errors import StorageError, StorageFullError

__all__ = ["require_space", "write_error", "write_errors"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Around code of ours that writes files below `folder`: what the system says becomes a StorageError."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, lmdb.Error) as error:
        raise write_error(folder, error) from error


def write_error(folder: Path, error: Exception) -> StorageError:
    """The error of the store for one of the system or of LMDB, met while `folder` was written to."""
    number = _error_number(error)
    reason = os.strerror(number) if number > 0 else str(error)
    if number not in _FULL:
        return StorageError(
            f"{folder}: the store cannot be written to: {reason}; check that this user may write there and "
            "that the disk is not mounted read-only"
        )
    return _full(folder, reason, f"{_bytes_below(folder)} bytes were written before it was full")


def _error_number(error: Exception) -> int:
    """LMDB reports a write that was cut short, as on a full disk, as an error of input and output."""
    if not isinstance(error, lmdb.Error):
        return getattr(error, "errno", None) or 0
    return errno.ENOSPC if isinstance(error, lmdb.DiskError) or error.code == errno.EIO else error.code


def require_space(folder: Path, num_bytes: int) -> None:
    """Refuse early what certainly does not fit.

    Raises:
        StorageFullError: If less than so many bytes are free where `folder` lies.
    """
    free = _free_bytes(folder)
    if free is not None and free < num_bytes:
        raise _full(folder, "there is not enough space", f"{num_bytes} bytes are needed")


def _full(folder: Path, reason: str, needed: str) -> StorageFullError:
    free = _free_bytes(folder)
    return StorageFullError(
        f"{folder}: the disk is full ({reason}): {needed}, {'?' if free is None else free} bytes are free; "
        "what was published before is whole. Make room (gc removes what no snapshot needs) and commit again"
    )


def _free_bytes(folder: Path) -> int | None:
    """What may still be written where the folder lies; None where the file system does not tell."""
    for place in (folder, *folder.parents):
        try:
            status = os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        return status.f_bavail * status.f_frsize if status.f_blocks else None
    return None


def _bytes_below(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512  # noqa: PTH118
    return total
