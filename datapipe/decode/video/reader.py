"""Frames of a video by index or by time, the same ones that a read from the start gives."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from datapipe.decode.image import DEFAULT_MAX_PIXELS
from datapipe.decode.video.decord_frames import DecordFrames, decord_fault
from datapipe.decode.video.frame_index import FrameIndex, index_from_packets
from datapipe.decode.video.info import VideoInfo
from datapipe.decode.video.opening import open_video
from datapipe.decode.video.orientation import UPRIGHT, Orientation
from datapipe.decode.video.pyav_frames import FrameLostError, PyavFrames
from datapipe.decode.video.scan import decoded_frames, orientation_of, scan_video
from datapipe.decode.video.source import VideoSource
from datapipe.errors import DataError, DecodeError

__all__ = ["Backend", "VideoReader"]

Backend = Literal["auto", "pyav", "decord"]

_LOG: Final = logging.getLogger(__name__)


class VideoReader:
    """An open video. Use it as a context manager; it is not for use from two threads at once.

    Opening reads the times of all packets and decodes nothing, where packets name their frames for sure;
    else, and where damage is met later, the file is scanned as at ingest, so that an index always is a
    place in what a sequential read gives. Decoding starts at the nearest key frame that is a safe start
    (for open groups of pictures and rolling refresh that may be the first frame) and holds a few frames.

    Frames are uint8 (H, W, 3) RGB, turned and mirrored as the container asks. Negative indices count from
    the end. Times are in seconds of the container's clock; in MPEG-TS and MPEG-PS, from the first frame.
    """

    def __init__(
        self,
        source: VideoSource,
        *,
        backend: Backend = "auto",
        num_threads: int = 1,
        info: VideoInfo | None = None,
        num_frames: int | None = None,
        max_pixels: int = DEFAULT_MAX_PIXELS,
    ) -> None:
        """Args:
        source: The encoded file as bytes or a buffer, or the path of a regular file. A buffer must stay
            valid until close().
        backend: `pyav`; `decord`, which is used for the files that it reads right (see decord_fault) and
            leaves the others to PyAV; `auto` is PyAV, which is right for all and skips pictures that no
            other one depends on.
        num_threads: Decoding threads.
        info: Result of scan_video for the same file; saves the first pass.
        num_frames: The count that ingest recorded; where the packets say another, the file is scanned.
        max_pixels: Budget of pixels a frame, read from the header.

        Raises:
            DecodeError: The reasons of open_video and scan_video.
            MissingExtraError: Without PyAV, or without decord when it is asked for.
        """
        if backend not in get_args(Backend):
            raise DataError(f"backend is {backend!r}, wanted one of {', '.join(get_args(Backend))}")
        if num_threads < 1:
            raise DataError(f"num_threads is {num_threads}, wanted 1 or more")
        self._source = source
        self._num_threads = num_threads
        self._max_pixels = max_pixels
        self._frames: PyavFrames | DecordFrames
        # Not a method: a cycle would keep closed decoders in memory until the next collection.
        self._open = partial(open_video, source, num_threads=num_threads, max_pixels=max_pixels)
        video = self._open()
        self._facts = video.facts
        self._info = info
        self._orientation: Orientation | None = None
        if info is None:
            index = index_from_packets(video, use_tables=backend != "decord")
        else:
            index = FrameIndex.from_info(info)
        if index is None or (num_frames is not None and num_frames != len(index)):
            video.close()
            self._use_scan()
        else:
            self._index = index
            self._frames = PyavFrames(video, index, self._open)
        if info is not None:
            self._orientation = Orientation(rotation=info.rotation, is_mirrored=info.is_mirrored)
        if backend == "decord":
            self._try_decord()

    @property
    def backend(self) -> str:
        """Which package decodes: `pyav` or `decord`."""
        return self._frames.name

    @property
    def num_decoded(self) -> int:
        """Frames decoded so far, those on the way to the wanted ones included."""
        return self._frames.num_decoded

    @property
    def fps(self) -> float:
        """Frames per second in the mean."""
        span = self.times[-1] - self.times[0]
        return float((len(self) - 1) / span) if span > 0 else self._facts.header_fps

    @property
    def times(self) -> NDArray[np.float64]:
        """Presentation times in seconds, float64 (F,), increasing."""
        ticks = (self._index.pts - self._index.zero).astype(np.float64)
        return ticks * np.float64(self._index.time_base)

    @property
    def rotation(self) -> int:
        """Degrees clockwise that frames are turned by."""
        return self._upright().rotation

    def presentation_time(self, index: int) -> Fraction:
        """Exact time in seconds at which a frame is shown."""
        return int(self._index.pts[self._checked(index)] - self._index.zero) * self._index.time_base

    def index_at(self, time_s: float | Fraction) -> int:
        """The frame that is shown at a time. Times outside the video give its first or last frame."""
        return self._index.position_at(time_s)

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        position = 0
        while position < len(self):
            yield self.frame(position)
            position += 1

    def frame(self, index: int) -> NDArray[np.uint8]:
        """Decode one frame: uint8 (H, W, 3)."""
        frame: NDArray[np.uint8] = self.frames([index])[0]
        return frame

    def frames(self, indices: Sequence[int]) -> NDArray[np.uint8]:
        """Decode frames in the order asked for, repeats allowed.

        Returns:
            Writable uint8 (N, H, W, 3).

        Raises:
            IndexError: For an index that the video does not have.
            DecodeError: Reason `corrupt`, if the file changed since it was opened.
        """
        while True:
            positions = [self._checked(index) for index in indices]
            try:
                return self._read(positions)
            except FrameLostError as error:
                self._recover(error)

    def frame_at(self, time_s: float | Fraction) -> NDArray[np.uint8]:
        """Decode the frame that is shown at a time: uint8 (H, W, 3)."""
        frame: NDArray[np.uint8] = self.frames_at([time_s])[0]
        return frame

    def frames_at(self, times_s: Sequence[float | Fraction]) -> NDArray[np.uint8]:
        """Decode the frames that are shown at some times, clamped to those that decode.

        Returns:
            Writable uint8 (N, H, W, 3).
        """
        while True:
            positions = [self.index_at(time) for time in times_s]
            try:
                return self._read(positions)
            except FrameLostError as error:
                self._recover(error)

    def close(self) -> None:
        """Free the decoder and the file. May be called twice."""
        self._frames.close()

    def __enter__(self) -> VideoReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, positions: list[int]) -> NDArray[np.uint8]:
        before = self.num_decoded
        places: dict[int, list[int]] = {}
        for place, position in enumerate(positions):
            places.setdefault(position, []).append(place)
        batch: NDArray[np.uint8] | None = None
        for position, stored in self._frames.frames(sorted(places)):
            pixels = self._upright().apply(stored)
            if batch is None:
                batch = np.empty((len(positions), *pixels.shape), np.uint8)
            for place in places[position]:
                batch[place] = pixels
        _LOG.debug("decoded %d frames for %d", self.num_decoded - before, len(places))
        return np.empty((0, 0, 0, 3), np.uint8) if batch is None else batch

    def _upright(self) -> Orientation:
        if self._orientation is None:
            if isinstance(self._frames, PyavFrames) and self._frames.orientation is not None:
                self._orientation = self._frames.orientation
            else:
                self._orientation = self._first_orientation()
        return self._orientation

    def _first_orientation(self) -> Orientation:
        with self._open() as video:
            frame = next(decoded_frames(video), None)
        return UPRIGHT if frame is None else orientation_of(frame)

    def _checked(self, index: int) -> int:
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"frame {index} of a video of {len(self)} frames")
        return int(position)

    def _try_decord(self) -> None:
        if decord_fault(self._facts, self._index, self._upright()) is not None:
            return
        try:
            frames = DecordFrames(self._source, self._index, num_threads=self._num_threads)
        except FrameLostError as error:
            _LOG.info("decord is left aside: %s", error)
            return
        self._frames.close()
        self._frames = frames

    def _recover(self, error: FrameLostError) -> None:
        """Take the next more careful way: PyAV for decord, then a scan, then a read from the start."""
        _LOG.info("reading more carefully: %s", error)
        is_pyav = self.backend == "pyav"
        self.close()
        if self._info is None:
            self._use_scan()
        elif is_pyav and not self._index.can_seek:
            raise DecodeError("corrupt", f"the frames differ from those of the scan: {error}") from error
        else:
            self._index = replace(self._index, can_seek=self._index.can_seek and not is_pyav)
            self._frames = PyavFrames(self._open(), self._index, self._open)

    def _use_scan(self) -> None:
        self._info = scan_video(self._source, max_damaged=1.0, max_pixels=self._max_pixels)
        self._index = FrameIndex.from_info(self._info)
        self._frames = PyavFrames(self._open(), self._index, self._open)
