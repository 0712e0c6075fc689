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

    def read(self, size: int | None = -1) -> bytes:
        """Read size bytes, fewer only at the end of the stream."""
        wanted = -1 if size is None else size
        pieces: list[bytes] = []
        while wanted:
            piece = self._stream.read(_SKIP_BYTES if wanted < 0 else min(wanted, 16 * _SKIP_BYTES))
            if not piece:
                break
            pieces.append(piece)
            self._position += len(piece)
            wanted -= len(piece) if wanted > 0 else 0
        return b"".join(pieces)

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            while self.read(_SKIP_BYTES):
                pass
            target = self._position + offset
        else:
            target = offset + (self._position if whence == io.SEEK_CUR else 0)
        if target < self._position:
            self._stream.close()
            self._stream = self._begin()
            self._position = 0
        while self._position < target and self.read(min(_SKIP_BYTES, target - self._position)):
            pass
        return self._position

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()
