"""One ingest at a time into a store."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from datapipe.errors import DataError, StoreBusyError

__all__ = ["IngestLock"]

_FILE: Final = "ingest.lock"


class IngestLock:
    """A lock on `STORE/reports/ingest.lock`, which the system gives back when its holder ends, however.

    The file tells who holds it. It stays, without a meaning, when nobody does.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def take(self, store: Path) -> None:
        """Hold the lock of a store from now on; once it is held, nothing happens.

        Raises:
            StoreBusyError: If another ingest holds it, or the file system has no locks.
            DataError: If nothing can be written there.
        """
        if self._file is not None:
            return
        path = store / "reports" / _FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise DataError(
                f"{path}: cannot be written: {error.strerror}; check that this user may write there and that "
                "the disk is not mounted read-only"
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(file)
            file.close()
            raise StoreBusyError(
                f"{store}: {holder} is bringing samples in; wait until it is done, or ingest into another "
                "store"
            ) from error
        except OSError as error:
            file.close()
            raise StoreBusyError(
                f"{path}: cannot be locked: {error.strerror}; use another file system"
            ) from error
        since = datetime.now(UTC).isoformat(timespec="seconds")
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}) + "\n")
        file.flush()
        self._file = file

    def __enter__(self) -> IngestLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        found = json.loads(file.read())
        return f"process {found['pid']} on {found['host']}, since {found['since']},"
    except (ValueError, KeyError, TypeError):
        return "another process"  # which has not written its name yet
