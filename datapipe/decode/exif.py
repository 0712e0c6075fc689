"""EXIF orientation: read it without ever losing the picture, and turn the pixels upright."""

from __future__ import annotations

import struct
from typing import Final

from PIL import Image

__all__ = ["METADATA_ERRORS", "apply_orientation", "orientation_of", "read_orientation", "swaps_axes"]

_ORIENTATION_TAG: Final = 0x0112

# What Pillow's metadata parsers have been seen to raise on empty, doubled or garbage blocks. The pixels
# are fine in all of these cases, so that each is survived.
METADATA_ERRORS: Final = (
    AssertionError,
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    OSError,
    OverflowError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    ZeroDivisionError,
    struct.error,
)

_TRANSPOSE: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_orientation(image: Image.Image) -> tuple[int, bool]:
    """Read the orientation tag (EXIF 2.3, tag 0x0112).

    Returns:
        The orientation 1..8, and whether the block was broken. Anything unreadable counts as 1.
    """
    try:
        tags = image.getexif()
    except METADATA_ERRORS:
        return 1, True
    return orientation_of(tags)


def orientation_of(tags: Image.Exif) -> tuple[int, bool]:
    """The orientation in a block of tags, as read_orientation tells it."""
    try:
        value = tags.get(_ORIENTATION_TAG, 1)
    except METADATA_ERRORS:
        return 1, True
    if isinstance(value, int) and 1 <= value <= 8:
        return value, False
    return 1, True


def apply_orientation(image: Image.Image, orientation: int) -> Image.Image:
    """Turn and mirror stored pixels so that the picture stands upright."""
    method = _TRANSPOSE.get(orientation)
    return image if method is None else image.transpose(method)


def swaps_axes(orientation: int) -> bool:
    """Whether width and height change places under this orientation."""
    return orientation >= 5
