"""A stream that can only be read forwards, made seekable without a copy of it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import IO, Final

__all__ = ["ForwardFile"]

_SKIP_BYTES: Final = 2**20


class ForwardFile(io.RawIOBase):
    """Seeks forwards by reading on and backwards by beginning again.

    Nothing is kept, so that reading in order costs one pass, whatever the length of the stream.
    """

    def __init__(self, begin: Callable[[], IO[bytes]]) -> None:
        """Args:
        begin: Opens the stream at its start.
        """
        super().__init__()
        self._begin = begin
        self._stream = begin()
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Take what comes next, possibly less than fits: what stands before damage is not lost with it."""
        data = self._stream.read(len(buffer))
        self._position += len(data)
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            while self.read(_SKIP_BYTES):
                continue
            target = self._position + offset
        else:
            target = offset + (self._position if whence == io.SEEK_CUR else 0)
        if target < self._position:
            self._stream.close()
            self._stream = self._begin()
            self._position = 0
        while self._position < target and self.read(min(_SKIP_BYTES, target - self._position)):
            continue
        return self._position

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()
