"""A video as a seekable file: bytes in memory without a copy, or a regular file on disk."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

from datapipe.errors import DecodeError

__all__ = ["VideoSource", "open_source"]

VideoSource = bytes | bytearray | memoryview | str | os.PathLike[str]


class _MemoryFile(io.RawIOBase):
    """Reads from a buffer, such as a page of a memory map, and copies only the pieces asked for."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(data).cast("B")
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._view)}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        stop = len(self._view) if size is None or size < 0 else self._position + size
        piece = bytes(self._view[self._position : stop])
        self._position += len(piece)
        return piece


def open_source(source: VideoSource) -> tuple[BinaryIO, int]:
    """Return a readable, seekable file and its size in bytes.

    Raises:
        DecodeError: Reasons `not_a_file` (a folder, a named pipe, a device), `unreadable_file`, `empty`.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        file: BinaryIO = _MemoryFile(source)  # type: ignore[assignment]
        size = memoryview(source).nbytes
    else:
        path = Path(source)
        try:
            # Opening a named pipe would block for ever.
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise DecodeError("not_a_file", f"{path.name!r} is not a regular file")
            file, size = path.open("rb"), status.st_size
        except OSError as error:
            raise DecodeError("unreadable_file", f"{path.name!r}: {error.strerror or error}") from error
    if size == 0:
        file.close()
        raise DecodeError("empty", "the file has 0 bytes")
    return file, size
