"""Clips of videos by time: start, length and frames per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from datapipe.decode.resize import resize_pixels
from datapipe.decode.video import VideoInfo, VideoReader, VideoSource
from datapipe.errors import DataError

__all__ = ["ClipField", "even_starts", "read_clips"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipField:
    """What a clip is."""

    length_s: float  # seconds of the video
    fps: float  # frames taken of each second; those of the video are left out or repeated
    size: tuple[int, int] | None = None  # (height, width) pixels; None keeps those of the video

    def __post_init__(self) -> None:
        if self.length_s <= 0 or self.fps <= 0 or self.num_frames < 1:
            raise DataError(
                f"a clip of {self.length_s} s at {self.fps} frames a second has no frame; raise one of them"
            )

    @property
    def num_frames(self) -> int:
        return round(self.length_s * self.fps)


def even_starts(duration_s: float, clip: ClipField, num_clips: int) -> list[float]:
    """Starts of clips in seconds, spread evenly from the first to the last place where one fits.

    A single clip lies in the middle. In a video that is shorter than the clip all start at 0.
    """
    room = max(0.0, duration_s - clip.length_s)
    return [room / 2] if num_clips == 1 else np.linspace(0.0, room, num_clips).tolist()


def read_clips(
    source: VideoSource,
    starts_s: Sequence[float],
    clip: ClipField,
    *,
    info: VideoInfo | None = None,
    num_frames: int | None = None,
) -> NDArray[np.uint8]:
    """Decode clips of one video, which is opened once.

    Frame i of a clip is the one shown at start + (i + 0.5) / fps, the middle of its span, so that no frame
    hangs on the rounding of a time. Beyond the ends of the video its first or last frame stands.

    Args:
        source: Bytes of the file, such as `store.blob(row)`, or its path.
        starts_s: Seconds from time 0 of the video, in any order.
        clip: Length, rate and size.
        info: Result of scan_video; saves a pass.
        num_frames: The column `n_frames` of the row, which ingest recorded.

    Returns:
        Writable uint8 (N, F, H, W, 3) RGB: N clips of F frames.

    Raises:
        DecodeError: As VideoReader.
    """
    times = [start + (index + 0.5) / clip.fps for start in starts_s for index in range(clip.num_frames)]
    with VideoReader(source, info=info, num_frames=num_frames) as reader:
        frames = reader.frames_at(times)
    if clip.size is not None and len(frames):
        frames = np.stack([resize_pixels(frame, clip.size, "bilinear") for frame in frames])
    return frames.reshape(len(starts_s), clip.num_frames, *frames.shape[1:])
