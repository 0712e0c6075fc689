"""Open text tables: UTF-8 with or without a byte order mark, packed or not, and nothing wider."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Final, TextIO

from datapipe.errors import SourceError
from datapipe.sources.compression import DAMAGE, open_plain
from datapipe.sources.remote import SourcePath

__all__ = ["open_bytes", "open_text", "undecodable_byte"]

_HEAD_BYTES: Final = 4
_WIDE_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")
_MARK: Final = b"\xef\xbb\xbf"


@contextmanager
def open_bytes(path: SourcePath) -> Iterator[IO[bytes]]:
    """Open a text file for its bytes, after the byte order mark.

    Raises:
        SourceError: If it is UTF-16 or UTF-32, or damaged from its first bytes on.
    """
    with open_plain(path) as file:
        try:
            head = file.read(_HEAD_BYTES)
        except DAMAGE as error:
            raise SourceError(f"{path}: not even its beginning can be read ({error})") from error
        if head.startswith(_WIDE_MARKS) or _is_wide(head):
            raise SourceError(f"{path}: the text is UTF-16 or UTF-32; convert the file to UTF-8")
        file.seek(len(_MARK) if head.startswith(_MARK) else 0)
        yield file


@contextmanager
def open_text(path: SourcePath) -> Iterator[TextIO]:
    """Open for characters, line ends untouched. Bytes that are no UTF-8 arrive as U+DC80..U+DCFF.

    Raises:
        SourceError: See open_bytes.
    """
    with open_bytes(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
        try:
            yield text
        finally:
            text.detach()


def _is_wide(head: bytes) -> bool:
    """Whether every second byte is NUL, as of Latin letters in UTF-16 or UTF-32 without a mark."""
    return len(head) == _HEAD_BYTES and any(head[::2]) != any(head[1::2])


def undecodable_byte(text: str) -> int | None:
    """The first byte that was no UTF-8 in what open_text gave."""
    return next((ord(char) - 0xDC00 for char in text if "\udc80" <= char <= "\udcff"), None)
