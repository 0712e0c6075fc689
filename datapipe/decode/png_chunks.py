"""What Pillow lets pass in a PNG: wrong checksums of the pixel data, a palette or rows that are not there."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

from datapipe.errors import DecodeError

__all__ = ["check_png_chunks", "check_png_rows", "exif_of_png", "png_of_pixels"]

_SIGNATURE_BYTES: Final = 8
_COLOUR_TYPE_AT: Final = 25  # in the header chunk
_PALETTE_TYPE: Final = 3
_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of a colour type
_ADAM7: Final = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
"""First column and row, and steps between columns and rows, of each pass (PNG specification, 8.2)."""
_PIECE_BYTES: Final = 1 << 20
_SEEN_IN_PIXELS: Final = frozenset({b"tRNS", b"eXIf", b"acTL", b"fcTL", b"fdAT"})


def check_png_chunks(data: bytes | memoryview) -> None:
    """Compare the CRC of each chunk that pixels depend on (PNG specification, 5.3), and look for the palette.

    A chunk that the file does not hold whole is left to the decoder, which tells how much is missing.

    Raises:
        DecodeError: Reason `corrupt`, naming chunk and offset.
    """
    view = memoryview(data)
    needs_palette = len(view) > _COLOUR_TYPE_AT and view[_COLOUR_TYPE_AT] == _PALETTE_TYPE
    for kind, offset, chunk in _whole_chunks(view):
        if _is_critical(kind) and not _has_right_checksum(chunk):
            raise DecodeError(
                "corrupt", f"PNG chunk {kind.decode('latin-1')} at byte {offset} has a wrong checksum"
            )
        if kind == b"PLTE":
            needs_palette = False
        if kind == b"IDAT" and needs_palette:
            raise DecodeError(
                "corrupt", f"pixels at byte {offset} name colours of a palette that is not there"
            )


def check_png_rows(data: bytes | memoryview) -> None:
    """Count the bytes of the rows, since Pillow leaves those black that the compressed data do not hold.

    Raises:
        DecodeError: Reason `truncated`, with the bytes found and wanted.
    """
    view = memoryview(data)
    wanted, found = _row_bytes(view), 0
    inflate = zlib.decompressobj()
    for kind, _, chunk in _whole_chunks(view):
        if kind != b"IDAT" or inflate.eof:
            continue
        rest: bytes | memoryview = chunk[8:-4]
        while rest and not inflate.eof and found < wanted:
            found += len(inflate.decompress(rest, _PIECE_BYTES))
            rest = inflate.unconsumed_tail
    if found < wanted:
        raise DecodeError("truncated", f"the rows of the PNG have {found} bytes, its size wants {wanted}")


def exif_of_png(data: bytes | memoryview) -> bytes | None:
    """The EXIF block, which may stand behind the pixels."""
    for kind, _, chunk in _whole_chunks(memoryview(data)):
        if kind == b"eXIf" and _has_right_checksum(chunk):
            return bytes(chunk[8:-4])
    return None


def png_of_pixels(data: bytes | memoryview) -> bytes:
    """The file without texts, profiles and times, and without what has a wrong checksum among the rest."""
    view = memoryview(data)
    kept, end = [view[:_SIGNATURE_BYTES]], _SIGNATURE_BYTES
    for kind, offset, chunk in _whole_chunks(view):
        end = offset + len(chunk)
        if _is_critical(kind) or (kind in _SEEN_IN_PIXELS and _has_right_checksum(chunk)):
            kept.append(chunk)
    return b"".join([*kept, view[end:]])


def _whole_chunks(view: memoryview) -> Iterator[tuple[bytes, int, memoryview]]:
    """Type, offset and all bytes of each chunk before the end mark that the file holds whole."""
    offset = _SIGNATURE_BYTES
    while offset + 12 <= len(view):
        end = offset + 12 + int.from_bytes(view[offset : offset + 4], "big")
        kind = bytes(view[offset + 4 : offset + 8])
        if kind == b"IEND" or end > len(view):
            return
        yield kind, offset, view[offset:end]
        offset = end


def _is_critical(kind: bytes) -> bool:
    return not kind[0] & 0x20  # upper case


def _has_right_checksum(chunk: memoryview) -> bool:
    return zlib.crc32(chunk[4:-4]) == int.from_bytes(chunk[-4:], "big")


def _row_bytes(view: memoryview) -> int:
    """Bytes of all rows with their filter types, before compression."""
    width, height = int.from_bytes(view[16:20], "big"), int.from_bytes(view[20:24], "big")
    depth, colour_type, is_interlaced = view[24], view[25], view[28]
    bits = depth * _CHANNELS.get(colour_type, 0)
    passes = _ADAM7 if is_interlaced else ((0, 0, 1, 1),)
    total = 0
    for first_column, first_row, column_step, row_step in passes:
        columns = max(0, -(-(width - first_column) // column_step))
        rows = max(0, -(-(height - first_row) // row_step))
        total += rows * (1 + -(-columns * bits // 8)) if columns else 0
    return total
