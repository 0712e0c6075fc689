"""Open a file for its plain content: gz, bz2, xz and zst are told by their first bytes."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, cast

import zstandard

from datapipe.sources.forward import ForwardFile
from datapipe.sources.remote import SourcePath

__all__ = ["COMPRESSED_SUFFIXES", "DAMAGE", "open_binary", "open_plain", "strip_compression"]

COMPRESSED_SUFFIXES: Final = (".gz", ".bz2", ".xz", ".zst")

# What reading a damaged or vanishing file raises.
DAMAGE: Final = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)

_MAGIC_BYTES: Final = 6
_READ_BYTES: Final = 2**18
_SLICE_BYTES: Final = 2**10  # of zst, which may grow to 32 MiB


def open_binary(path: SourcePath) -> IO[bytes]:
    """Open the file as it is, for reading and seeking."""
    return path.open("rb") if isinstance(path, Path) else path.open()


@contextmanager
def open_plain(path: SourcePath) -> Iterator[IO[bytes]]:
    """Open for reading and seeking in the decompressed content."""
    with open_binary(path) as file:
        magic = file.read(_MAGIC_BYTES)
        file.seek(0)
        unpack = next((unpack for start, unpack in _UNPACKERS.items() if magic.startswith(start)), None)
        if unpack is None:
            yield file
        else:
            with unpack(file) as plain:
                yield plain


def strip_compression(name: str) -> str:
    """The file name without .gz, .bz2, .xz or .zst."""
    suffix = next((suffix for suffix in COMPRESSED_SUFFIXES if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(suffix)]


class _ZstdStream(io.RawIOBase):
    """All frames of a zst file, one after the other. A frame that ends early is an EOFError."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._is_inside = False  # of a frame
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while not self._output:
            if not self._input:
                self._input = self._file.read(_READ_BYTES)
                if not self._input:
                    if self._is_inside:
                        raise EOFError("the zst stream ends inside a frame")
                    return b""
            self._unpack()
        count = len(self._output) if size < 0 else size
        data, self._output = bytes(self._output[:count]), self._output[count:]
        return data

    def _unpack(self) -> None:
        piece, self._input = self._input[:_SLICE_BYTES], self._input[_SLICE_BYTES:]
        self._output = memoryview(self._frame.decompress(piece))
        self._is_inside = not self._frame.eof
        if self._frame.eof:
            self._input = self._frame.unused_data + self._input
            self._frame = zstandard.ZstdDecompressor().decompressobj()


def _open_zstd(file: IO[bytes]) -> IO[bytes]:
    def begin() -> IO[bytes]:
        file.seek(0)
        return cast(IO[bytes], _ZstdStream(file))

    return cast(IO[bytes], io.BufferedReader(ForwardFile(begin), _READ_BYTES))


_UNPACKERS: Final[dict[bytes, Callable[[IO[bytes]], IO[bytes]]]] = {
    b"\x1f\x8b": lambda file: cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="rb")),
    b"BZh": lambda file: cast(IO[bytes], bz2.BZ2File(file)),
    b"\xfd7zXZ\0": lambda file: cast(IO[bytes], lzma.LZMAFile(file)),  # noqa: SIM115 - the caller closes it
    b"\x28\xb5\x2f\xfd": _open_zstd,
    # RFC 8878, 3.1.2: frames to be skipped, with which pzstd begins.
    **{bytes([kind]) + b"\x2a\x4d\x18": _open_zstd for kind in range(0x50, 0x60)},
}
