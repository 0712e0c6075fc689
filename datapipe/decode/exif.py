"""EXIF orientation: read it without ever losing the picture, and turn the pixels upright."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
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
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Names in PIL.Image.Transpose."""


def read_orientation(image: Image.Image) -> tuple[int, bool]:
    """Read the orientation tag (EXIF 2.3, tag 0x0112).

    Returns:
        The orientation 1..8, and whether the block was broken. Anything unreadable counts as 1.
    """
    from PIL.Image import Image

    try:
        tags = Image.getexif(image)  # that of a PNG would load the pixels, and hide what is wrong with them
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
    if method is None:
        return image
    from PIL.Image import Transpose

    return image.transpose(Transpose[method])


def swaps_axes(orientation: int) -> bool:
    """Whether width and height change places under this orientation."""
    return orientation >= 5
