"""Pictures whose metadata cannot be read: the same file with what its pixels need, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from datapipe.decode.jpeg import JFIF, jpeg_segments
from datapipe.decode.png_chunks import png_of_pixels
from datapipe.errors import DecodeError

__all__ = ["pixels_alone", "read_past_metadata"]

_Result = TypeVar("_Result")
_APPLICATION: Final = frozenset(range(0xE0, 0xF0))
_COMMENT: Final = 0xFE
_EXIF: Final = 0xE1
_ADOBE: Final = 0xEE  # tells the colour space


def read_past_metadata(
    read: Callable[[bytes | memoryview], _Result], data: bytes | memoryview, format_name: str
) -> tuple[_Result, bool]:
    """Read a picture, and once more without its metadata where it seems to be corrupt.

    Returns:
        What `read` made of it, and whether that took leaving metadata out.

    Raises:
        DecodeError: Of the first reading, if the second one fails too.
    """
    try:
        return read(data), False
    except DecodeError as error:
        alone = pixels_alone(data, format_name) if error.reason == "corrupt" else data
        if alone == data:
            raise
        try:
            return read(alone), True
        except DecodeError:
            raise error from None


def pixels_alone(data: bytes | memoryview, format_name: str) -> bytes | memoryview:
    """The file without profiles, texts and comments; of other formats than PNG and JPEG the file itself."""
    if format_name == "PNG":
        return png_of_pixels(data)
    if format_name == "JPEG":
        return _jpeg_of_pixels(bytes(data))
    return data


def _jpeg_of_pixels(data: bytes) -> bytes:
    kept, end = [data[:2]], 2
    for marker, start, end in jpeg_segments(data):
        segment = data[start:end]
        if segment[4:].startswith(JFIF):
            kept.append(segment[: 4 + len(JFIF)] + b"\1" + segment[5 + len(JFIF) :])  # version 1
        elif marker in (_EXIF, _ADOBE) or marker not in (*_APPLICATION, _COMMENT):
            kept.append(segment)
    return b"".join([*kept, data[end:]])
