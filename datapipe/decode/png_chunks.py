"""What Pillow lets pass in a PNG: wrong checksums of the pixel data, and a palette that is not there."""

from __future__ import annotations

import zlib
from typing import Final

from datapipe.errors import DecodeError

__all__ = ["check_png_chunks"]

_SIGNATURE_BYTES: Final = 8
_COLOUR_TYPE_AT: Final = 25  # in the header chunk
_PALETTE_TYPE: Final = 3


def check_png_chunks(data: bytes | memoryview) -> None:
    """Compare the CRC of each chunk that pixels depend on (PNG specification, 5.3), and look for the palette.

    A chunk that the file does not hold whole is left to the decoder, which tells how much is missing.

    Raises:
        DecodeError: Reason `corrupt`, naming chunk and offset.
    """
    view, offset = memoryview(data), _SIGNATURE_BYTES
    needs_palette = len(view) > _COLOUR_TYPE_AT and view[_COLOUR_TYPE_AT] == _PALETTE_TYPE
    while offset + 12 <= len(view):
        length = int.from_bytes(view[offset : offset + 4], "big")
        kind = bytes(view[offset + 4 : offset + 8])
        end = offset + 8 + length
        if kind == b"IEND" or end + 4 > len(view):
            return
        is_critical = not kind[0] & 0x20  # upper case
        if is_critical and zlib.crc32(view[offset + 4 : end]) != int.from_bytes(view[end : end + 4], "big"):
            raise DecodeError(
                "corrupt", f"PNG chunk {kind.decode('latin-1')} at byte {offset} has a wrong checksum"
            )
        if kind == b"PLTE":
            needs_palette = False
        if kind == b"IDAT" and needs_palette:
            raise DecodeError(
                "corrupt", f"pixels at byte {offset} name colours of a palette that is not there"
            )
        offset = end + 4
