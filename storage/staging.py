"""Where new files are made: in a folder of their own, and given their final name when they are complete."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from storage.backends.base import Backend
from storage.files import hash_descriptor
from storage.manifest import FileRef

__all__ = ["Staging"]

_LARGE_BYTES = 4 << 20


class Staging:
    """A folder of one commit. The id is also the name of the part that the commit makes.

    While it is open, gc removes no file that has the id in its path.
    """

    def __init__(self, backend: Backend, staging_id: str | None = None) -> None:
        self.backend = backend
        self.id = staging_id or f"{time.time_ns() // 1_000_000:011x}{secrets.token_hex(5)}"
        self._workspace = backend.open_workspace(self.id)
        self.path = self._workspace.path
        self._installed: list[str] = []

    def install(self, source: Path, relative: str, rows: int) -> FileRef:
        """Make a finished file durable and give it its final name; it counts for nothing until published."""
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            num_bytes = os.fstat(fd).st_size
            if num_bytes < _LARGE_BYTES:
                digest = hash_descriptor(fd)
                self.backend.install(source, relative)
            else:
                # The processor computes the checksum while the disk writes.
                with ThreadPoolExecutor(1) as pool:
                    hashing = pool.submit(hash_descriptor, fd)
                    self.backend.install(source, relative)
                    digest = hashing.result()
        finally:
            os.close(fd)
        self._installed.append(relative)
        return FileRef(path=relative, bytes=num_bytes, xxh3=digest, rows=rows)

    def flush(self) -> None:
        """Make the final names durable; to be called before the snapshot is published."""
        self.backend.flush(self._installed)

    def withdraw(self) -> None:
        """Remove what was installed. Only for a commit that certainly was not published."""
        for name in self._installed:
            with contextlib.suppress(FileNotFoundError):
                self.backend.remove(name)
            if name.startswith("blobs/"):
                self.backend.remove_empty_folder(name.rpartition("/")[0])
        self._installed = []

    def close(self) -> None:
        """Remove the folder and release the lock."""
        self._workspace.close()
