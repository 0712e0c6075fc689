"""Where new files are made: under temporary names, locked while their writer lives, renamed when complete."""

from __future__ import annotations

import fcntl
import secrets
import shutil
import time
from pathlib import Path

from storage.errors import StorageError
from storage.files import fsync_directory, fsync_file, hash_file
from storage.manifest import FileRef

__all__ = ["Staging", "is_abandoned"]

_LOCK_NAME = "writer.lock"


class Staging:
    """A folder staging/<id>/ of one commit. The id is also the name of the part that the commit makes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.id = f"{time.time_ns() // 1_000_000:011x}{secrets.token_hex(5)}"
        self.path = root / "staging" / self.id
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            raise StorageError(f"{root}: the store cannot be written to: {error.strerror}") from error
        self._lock = (self.path / _LOCK_NAME).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._installed: list[Path] = []

    def install(self, source: Path, relative: str, rows: int) -> FileRef:
        """Make a finished file durable and give it its final name; it counts for nothing until published."""
        fsync_file(source)
        ref = FileRef(path=relative, bytes=source.stat().st_size, xxh3=hash_file(source), rows=rows)
        target = self.root / relative
        if not target.parent.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            fsync_directory(target.parent.parent)
        source.rename(target)
        self._installed.append(target)
        return ref

    def flush(self) -> None:
        """Make the final names durable; to be called before the snapshot is published."""
        for folder in {target.parent for target in self._installed}:
            fsync_directory(folder)

    def withdraw(self) -> None:
        """Remove what was installed. Only for a commit that certainly was not published."""
        for target in self._installed:
            target.unlink(missing_ok=True)
            if target.parent.parent.name == "blobs":
                target.parent.rmdir()
        self._installed = []

    def close(self) -> None:
        """Remove the folder and release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def is_abandoned(folder: Path) -> bool:
    """Whether the writer of a staging folder is gone. Locks are seen on one machine only."""
    try:
        with (folder / _LOCK_NAME).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True
