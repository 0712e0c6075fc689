"""Boxes of an MP4 (ISO/IEC 14496-12, 4.2), as far as the checks of a video need them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

__all__ = ["boxes_of_file", "claimed_samples"]


def boxes_of_file(file: BinaryIO, size: int) -> Iterator[tuple[bytes, int, int]]:
    """Name, start and end of the content of each box at the top; stops at what is no box. The end of the
    last one may lie after the end of the file."""
    at = 0
    while at + 8 <= size:
        file.seek(at)
        head = file.read(16)
        length, skip = int.from_bytes(head[:4], "big"), 8
        if length == 1:
            length, skip = int.from_bytes(head[8:16], "big"), 16
        elif length == 0:
            length = size - at
        if length < skip:
            return
        yield head[4:8], at + skip, at + length
        at += length


def claimed_samples(file: BinaryIO, size: int) -> int:
    """Frames that `stsz` of the first video track claims (8.7.3); 0 when there is none. FFmpeg takes the
    word of another table."""
    for name, start, end in boxes_of_file(file, size):
        if name == b"moov":
            file.seek(start)
            moov = memoryview(file.read(end - start))
            return next((_samples(track) for track in _find(moov, b"trak") if _is_video(track)), 0)
    return 0


def _is_video(track: memoryview) -> bool:
    return any(
        handler[8:12] == b"vide" for media in _find(track, b"mdia") for handler in _find(media, b"hdlr")
    )


def _samples(track: memoryview) -> int:
    inner = track
    for name in (b"mdia", b"minf", b"stbl", b"stsz"):
        inner = next(_find(inner, name), memoryview(b""))
    return int.from_bytes(inner[8:12], "big")


def _find(parent: memoryview, wanted: bytes) -> Iterator[memoryview]:
    """Contents of the boxes of a name directly inside another."""
    at = 0
    while at + 8 <= len(parent):
        length = int.from_bytes(parent[at : at + 4], "big")
        if length < 8:
            return
        if parent[at + 4 : at + 8] == wanted:
            yield parent[at + 8 : at + length]
        at += length
