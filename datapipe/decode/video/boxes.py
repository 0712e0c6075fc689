"""Boxes of an MP4 (ISO/IEC 14496-12, 4.2), as far as the checks of a video need them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

__all__ = ["boxes_of_file", "claimed_samples", "composition_offsets"]


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
    tracks = _video_tracks(file, size)
    return _claim(_table(tracks[0], b"stsz")) if tracks else 0


def composition_offsets(file: BinaryIO, size: int) -> NDArray[np.int64]:
    """From decoding to presentation time (`ctts`, 8.6.1.3) of each sample of the only video track.

    Returns:
        int64 (F,), in units of the track's clock; empty for files with several video tracks, or without a
        table that fits the count of samples.
    """
    tracks = _video_tracks(file, size)
    if len(tracks) != 1:
        return np.zeros(0, np.int64)
    count = _claim(_table(tracks[0], b"stsz"))
    table = _table(tracks[0], b"ctts")
    if len(table) < 8:
        return np.zeros(count if count <= size else 0, np.int64)
    num_runs = min(int.from_bytes(table[4:8], "big"), (len(table) - 8) // 8)
    runs = np.frombuffer(table, dtype=">i4", count=2 * num_runs, offset=8).reshape(-1, 2).astype(np.int64)
    if count > size or (runs[:, 0] < 0).any() or runs[:, 0].sum() != count:
        return np.zeros(0, np.int64)
    return np.repeat(runs[:, 1], runs[:, 0])


def _video_tracks(file: BinaryIO, size: int) -> list[memoryview]:
    for name, start, end in boxes_of_file(file, size):
        if name == b"moov":
            file.seek(start)
            moov = memoryview(file.read(end - start))
            return [track for track in _find(moov, b"trak") if _is_video(track)]
    return []


def _is_video(track: memoryview) -> bool:
    handlers = (handler for media in _find(track, b"mdia") for handler in _find(media, b"hdlr"))
    return any(bytes(handler[8:12]) == b"vide" for handler in handlers)


def _table(track: memoryview, wanted: bytes) -> memoryview:
    inner = track
    for name in (b"mdia", b"minf", b"stbl", wanted):
        inner = next(_find(inner, name), memoryview(b""))
    return inner


def _claim(table: memoryview | bytes) -> int:
    return int.from_bytes(table[8:12], "big")


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
