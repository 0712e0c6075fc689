"""Frames from PyAV: seek to an entry point, decode up to the frame, convert only what was asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from datapipe.decode.video.frame_index import FrameIndex
from datapipe.decode.video.opening import OpenVideo
from datapipe.decode.video.orientation import Orientation
from datapipe.decode.video.packages import import_av
from datapipe.decode.video.packets import is_unreferred, nal_length_bytes
from datapipe.decode.video.scan import decoded_frames, orientation_of

if TYPE_CHECKING:
    from av import VideoFrame
    from av.packet import Packet

__all__ = ["FrameLostError", "PyavFrames"]

# Decoding over a near entry point is cheaper than seeking to it.
_NEAR_FRAMES: Final = 8
_SEEK_TRIES: Final = 3


class FrameLostError(Exception):
    """The index promised a frame that decoding did not give, or damage was met. Never leaves the package."""


class PyavFrames:
    """Gives stored frames in increasing order of position, not yet turned upright.

    Holds one decoder and the few frames that wait in it. Not for use from two threads at once.
    """

    name: Final = "pyav"

    def __init__(self, video: OpenVideo, index: FrameIndex, reopen: Callable[[], OpenVideo]) -> None:
        """Args:
        video: Open file, taken over.
        index: Of its frames.
        reopen: Opens it again, where no seek leads back.
        """
        from av.video.reformatter import VideoReformatter

        self._video = video
        self._size = (video.facts.stored_width, video.facts.stored_height)
        self._index = index
        self._reopen = reopen
        self._reformatter = VideoReformatter()
        self._error = import_av().error.FFmpegError
        self._can_skip = video.facts.codec == "h264"
        self._length_bytes = nal_length_bytes(video.facts.codec, video.stream.codec_context.extradata)
        self._packets: Iterator[Packet[Any]] | None = None
        self._waiting: deque[VideoFrame] = deque()
        self._last_pts: int | None = None
        self._newest_entry = -1
        self._linear: Iterator[VideoFrame] | None = None
        self._next_position = 0
        self.num_decoded = 0
        self.orientation: Orientation | None = None  # known from the first frame on

    def close(self) -> None:
        self._packets = self._linear = None
        self._waiting.clear()
        self._video.close()

    def frames(self, positions: Sequence[int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Decode frames to uint8 (H, W, 3) RGB. A stream that changes its size is scaled to its first;
        transparency is composited on white.

        Args:
            positions: Increasing, without repeats, within the index.

        Raises:
            FrameLostError: If the index is not what decoding finds.
        """
        found = self._by_time(positions) if self._index.can_seek else self._from_start(positions)
        for position, frame in found:
            if self.orientation is None:
                self.orientation = orientation_of(frame)
            has_alpha = any(component.is_alpha for component in frame.format.components)
            pixels = self._pixels(frame, "rgba" if has_alpha else "rgb24")
            yield position, _on_white(pixels) if has_alpha else pixels

    def _pixels(self, frame: VideoFrame, form: str) -> NDArray[np.uint8]:
        width, height = self._size
        found = self._reformatter.reformat(frame, format=form, width=width, height=height, threads=1)
        pixels: NDArray[np.uint8] = found.to_ndarray().view(np.uint8)
        return pixels

    def _by_time(self, positions: Sequence[int]) -> Iterator[tuple[int, VideoFrame]]:
        times = self._index.pts[list(positions)].tolist()
        wanted = set(times)
        for position, pts in zip(positions, times):
            if not self._can_go_on(position, pts):
                self._seek(pts)
            yield position, self._advance(pts, wanted, times[-1])

    def _from_start(self, positions: Sequence[int]) -> Iterator[tuple[int, VideoFrame]]:
        for position in positions:
            if self._linear is None or position < self._next_position:
                self._rewind()
                self._linear = decoded_frames(self._video)
            num_before = position - self._next_position
            frame = next(islice(self._linear, num_before, None), None)
            if frame is None:
                raise FrameLostError(f"frame {position} is not there")
            self._next_position = position + 1
            self.num_decoded += num_before + 1
            yield position, frame

    def _rewind(self) -> None:
        self._video.close()
        self._video = self._reopen()
        self._packets, self._linear, self._next_position = None, None, 0
        self._waiting.clear()
        self._last_pts, self._newest_entry = None, -1

    def _can_go_on(self, position: int, pts: int) -> bool:
        is_at_end = self._packets is None and not self._waiting
        if is_at_end or (self._last_pts is not None and pts <= self._last_pts):
            return False
        entry = self._index.entry_before(pts)
        if entry <= self._newest_entry:
            return True
        done = 0 if self._last_pts is None else int(np.searchsorted(self._index.pts, self._last_pts))
        return position - done <= _NEAR_FRAMES

    def _seek(self, pts: int) -> None:
        """Go to the entry point before pts, to an earlier one where the container lands too late, or to
        the start of the file."""
        entry = self._index.entry_before(pts)
        for candidate in range(entry, max(-1, entry - _SEEK_TRIES), -1):
            if self._land_on(candidate):
                return
        self._rewind()
        self._packets = self._demux()

    def _land_on(self, entry: int) -> bool:
        target = int(self._index.entry_pts[entry])
        self._waiting.clear()
        try:
            self._video.container.seek(target, stream=self._video.stream, backward=True)
            packets = self._demux()
            for packet in packets:
                if packet.pts == target and packet.is_keyframe:
                    self._packets = _chain(packet, packets)
                    self._last_pts, self._newest_entry = None, entry
                    return True
                if packet.dts is None or packet.dts > target:
                    return False
        except self._error:
            return False
        return False

    def _demux(self) -> Iterator[Packet[Any]]:
        return (packet for packet in self._video.container.demux(self._video.stream) if packet.size)

    def _advance(self, pts: int, wanted: set[int], last_wanted: int) -> VideoFrame:
        while True:
            while self._waiting:
                frame = self._waiting.popleft()
                self._last_pts = frame.pts
                if frame.is_corrupt or frame.pts is None or frame.pts > pts:
                    raise FrameLostError(f"no whole frame is shown at {pts}")
                if frame.pts == pts:
                    return frame
            self._decode_next(wanted, last_wanted)

    def _decode_next(self, wanted: set[int], last_wanted: int) -> None:
        decoder = self._video.stream.codec_context
        if self._packets is None:
            raise FrameLostError("the stream is at its end")
        try:
            packet = next(self._packets, None)
            if packet is None:
                self._packets = None
            elif packet.pts is not None:
                if packet.is_keyframe:
                    self._newest_entry = max(self._newest_entry, self._index.entry_before(packet.pts))
                if packet.pts <= last_wanted and packet.pts not in wanted and self._is_idle(packet):
                    return
            found = decoder.decode(packet)
        except self._error as error:
            raise FrameLostError(str(error)) from error
        self.num_decoded += len(found)
        self._waiting.extend(found)

    def _is_idle(self, packet: Packet[Any]) -> bool:
        """Whether the packet need not be decoded on the way to another frame."""
        return self._can_skip and is_unreferred(packet, self._length_bytes)


def _on_white(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Composite uint8 (H, W, 4) with straight alpha."""
    alpha = pixels[:, :, 3:].astype(np.uint16)
    mixed = pixels[:, :, :3] * alpha + 255 * (255 - alpha)
    return ((mixed + 127) // 255).astype(np.uint8)


def _chain(first: Packet[Any], rest: Iterator[Packet[Any]]) -> Iterator[Packet[Any]]:
    yield first
    yield from rest
