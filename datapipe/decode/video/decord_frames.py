"""Frames from decord, for the files that it reads right."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from datapipe.decode.video.frame_index import FrameIndex
from datapipe.decode.video.info import StreamFacts
from datapipe.decode.video.orientation import UPRIGHT, Orientation
from datapipe.decode.video.packages import import_decord
from datapipe.decode.video.pyav_frames import FrameLostError
from datapipe.decode.video.source import VideoSource

__all__ = ["DecordFrames", "decord_fault"]

_RIGHT_CONTAINERS: Final = frozenset({"mp4", "mov", "mkv", "webm"})
_RIGHT_CODECS: Final = frozenset({"h264", "hevc", "vp9", "av1", "mpeg4", "mjpeg"})
_RIGHT_PIXELS: Final = frozenset({"yuv420p", "yuvj420p", "yuv422p", "yuv444p"})
_MAX_AHEAD_BYTES: Final = 2**29
_CHUNK_FRAMES: Final = 16


def decord_fault(facts: StreamFacts, index: FrameIndex, orientation: Orientation) -> str | None:
    """Why decord would give other frames or other colours than a sequential read; None where it is right.

    Each rule stands for a file on which its answers were found wrong.
    """
    if facts.container not in _RIGHT_CONTAINERS:
        return f"container {facts.container}: its seeks land on other frames"
    if facts.codec not in _RIGHT_CODECS:
        return f"codec {facts.codec} is not among those checked"
    if facts.pixel_format not in _RIGHT_PIXELS:
        return f"pixel format {facts.pixel_format}: its colours differ"
    if orientation != UPRIGHT:
        return "the picture has to be turned, which it fails at or does in part"
    if index.has_edits:
        return "an edit list leaves frames out, which it counts"
    if index.has_open_groups:
        return "some frames reach across key frames, and it starts at any of them"
    if 3 * facts.stored_width * facts.stored_height * len(index) > _MAX_AHEAD_BYTES:
        return "it decodes ahead without bound, and all frames would not fit into 512 MiB"
    if not index.can_seek:
        return "times of packets do not name the frames"
    return None


class DecordFrames:
    """Gives stored frames in increasing order of position, not yet turned upright."""

    name: Final = "decord"

    def __init__(self, source: VideoSource, index: FrameIndex, *, num_threads: int) -> None:
        decord = import_decord()
        self._error: type[Exception] = decord.DECORDError
        in_memory = isinstance(source, bytes | bytearray | memoryview)
        self._bytes = io.BytesIO(source) if in_memory else None  # type: ignore[arg-type]
        where = self._bytes if self._bytes is not None else os.fspath(source)  # type: ignore[arg-type]
        try:
            self._reader: Any = decord.VideoReader(where, num_threads=num_threads)
        except (self._error, RuntimeError, AssertionError) as error:
            raise FrameLostError(str(error)) from error
        if len(self._reader) != len(index):
            raise FrameLostError(f"decord counts {len(self._reader)} frames, the packets are {len(index)}")
        self.num_decoded = 0

    def close(self) -> None:
        self._reader = None

    def frames(self, positions: Sequence[int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Decode frames, a few at a time, so that memory does not grow with their number.

        Raises:
            FrameLostError: If decord gives up.
        """
        for start in range(0, len(positions), _CHUNK_FRAMES):
            chunk = list(positions[start : start + _CHUNK_FRAMES])
            try:
                pixels: NDArray[np.uint8] = self._reader.get_batch(chunk).asnumpy()
            except (self._error, RuntimeError, IndexError) as error:
                raise FrameLostError(str(error)) from error
            self.num_decoded += len(chunk)
            yield from zip(chunk, pixels)
