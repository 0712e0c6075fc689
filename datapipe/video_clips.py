"""Clips of videos by time: start, length and frames per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from datapipe.decode.resize import resize_pixels
from datapipe.decode.video import VideoInfo, VideoReader, VideoSource
from datapipe.errors import DataError
from datapipe.whole_numbers import check_whole_numbers, whole_number

if TYPE_CHECKING:
    from datapipe.fields import RawSample

__all__ = ["ClipField", "VideoField", "clips_of_frames", "even_starts", "random_starts", "read_clips"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipField:
    """What a clip is."""

    length_s: float  # seconds of the video
    fps: float  # frames taken of each second; those of the video are left out or repeated
    size: tuple[int, int] | None = None  # (height, width) pixels; None keeps those of the video

    def __post_init__(self) -> None:
        if (
            not _is_finite(self.length_s, self.fps)
            or min(self.length_s, self.fps) <= 0
            or self.num_frames < 1
        ):
            raise DataError(
                f"a clip of {self.length_s!r} s at {self.fps!r} frames a second has no frame, or no end; "
                f"wanted two numbers whose product is 1 or more"
            )
        if self.size is not None:
            check_whole_numbers("size", self.size, 2, lowest=1, wanted="(height, width) in pixels, or None")

    @property
    def num_frames(self) -> int:
        return round(self.length_s * self.fps)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoField:
    """Clips of each row's video: `Loader(view, fields={"clips": VideoField(...)}, image=None, ...)`.

    Gives uint8 (num_clips, F, H, W, 3) RGB for each row. Rows whose videos have other sizes need `clip.size`.
    """

    needs_blob: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("duration_s", "n_frames")

    clip: ClipField
    num_clips: int = 1
    starts: Literal["even", "random"] | tuple[float, ...] = "even"
    """Seconds at which clips start; `even` spreads them over the video, `random` draws other ones in every
    epoch, the same on any number of ranks and workers."""
    frames: str | None = None
    """A tensor column of frames, uint8 (F, H, W, 3) or (F, 3, H, W), taken instead of decoding where a row
    has a value. Frame j stands for the seconds from j / frames_fps on."""
    frames_fps: float | None = None  # frames of that column a second

    def __post_init__(self) -> None:
        is_listed = isinstance(self.starts, tuple)
        whole_number("num_clips", self.num_clips, 1)
        if is_listed and len(self.starts) != self.num_clips:
            raise DataError(
                f"num_clips is {self.num_clips} and starts are {self.starts}; wanted as many starts as clips"
            )
        if not is_listed and self.starts not in ("even", "random"):
            raise DataError(f"starts are {self.starts!r}, wanted 'even', 'random' or a tuple of seconds")
        if is_listed and not _is_finite(*self.starts):
            raise DataError(f"starts are {self.starts!r}, wanted seconds, finite numbers")
        rate = 1.0 if self.frames_fps is None else self.frames_fps
        if (self.frames is None) != (self.frames_fps is None) or not _is_finite(rate) or rate <= 0:
            raise DataError(
                f"frames is {self.frames!r} and frames_fps {self.frames_fps}; give both, the rate above 0, "
                f"or neither"
            )

    @property
    def tensors(self) -> tuple[str, ...]:
        """The column of frames, if there is one."""
        return () if self.frames is None else (self.frames,)

    def read(self, raw: RawSample) -> NDArray[np.uint8]:
        """Decode the clips of one row, or take them out of its stored frames.

        Raises:
            DataError: If the row has neither frames nor a file, or no `duration_s` that would set the starts.
            DecodeError: As VideoReader.
        """
        stored = None if self.frames is None else raw.tensors[self.frames]
        if stored is not None and self.frames_fps is not None:
            starts = self._starts(len(stored) / self.frames_fps, raw.seed)
            return clips_of_frames(stored, starts, self.clip, frames_fps=self.frames_fps)
        if raw.blob is None:
            raise DataError("the row has no video, and no stored frames; leave it out of the query")
        starts = self._starts(raw.columns["duration_s"], raw.seed)
        return read_clips(raw.blob, starts, self.clip, num_frames=raw.columns["n_frames"])

    def _starts(self, duration_s: float | None, seed: int) -> Sequence[float]:
        if isinstance(self.starts, tuple):
            return self.starts
        if duration_s is None:
            raise DataError(
                f"the row has no duration_s, which starts={self.starts!r} needs; ingest records it"
            )
        if self.starts == "even":
            return even_starts(duration_s, self.clip, self.num_clips)
        return random_starts(duration_s, self.clip, self.num_clips, seed)


def _is_finite(*numbers: object) -> bool:
    return all(isinstance(number, Real) and math.isfinite(number) for number in numbers)


def even_starts(duration_s: float, clip: ClipField, num_clips: int) -> list[float]:
    """Starts of clips in seconds, spread evenly from the first to the last place where one fits.

    A single clip lies in the middle. In a video that is shorter than the clip all start at 0.
    """
    room = max(0.0, duration_s - clip.length_s)
    return [room / 2] if num_clips == 1 else np.linspace(0.0, room, num_clips).tolist()


def random_starts(duration_s: float, clip: ClipField, num_clips: int, seed: int) -> list[float]:
    """Starts of clips in seconds, ascending, each anywhere where a clip fits; they may overlap."""
    room = max(0.0, duration_s - clip.length_s)
    return sorted((np.random.default_rng(seed).random(num_clips) * room).tolist())


def clips_of_frames(
    frames: NDArray[Any], starts_s: Sequence[float], clip: ClipField, *, frames_fps: float
) -> NDArray[np.uint8]:
    """Clips out of frames that are stored already.

    Args:
        frames: uint8 (F, H, W, 3), or (F, 3, H, W). Frame j stands for the seconds from j / frames_fps to
            (j + 1) / frames_fps.
        starts_s: Seconds at which clips start.
        clip: Length, rate and size.
        frames_fps: Stored frames a second.

    Returns:
        uint8 (N, F, H, W, 3), as read_clips.

    Raises:
        DataError: For another shape or dtype.
    """
    is_last = frames.ndim == 4 and frames.shape[-1] == 3
    if not len(frames) or frames.dtype != np.uint8 or not (is_last or frames.shape[1:2] == (3,)):
        raise DataError(
            f"the stored frames are {frames.dtype} {frames.shape}, wanted uint8 (F, H, W, 3) or (F, 3, H, W)"
        )
    times = _middles(starts_s, clip)
    picked = frames[np.clip(np.floor(times * frames_fps), 0, len(frames) - 1).astype(np.int64)]
    return _as_clips(picked if is_last else picked.transpose(0, 2, 3, 1), clip)


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
    with VideoReader(source, info=info, num_frames=num_frames) as reader:
        frames = reader.frames_at(_middles(starts_s, clip).tolist())
    return _as_clips(frames, clip)


def _middles(starts_s: Sequence[float], clip: ClipField) -> NDArray[np.float64]:
    """Seconds in the middle of each frame's span, clip after clip."""
    inside = (np.arange(clip.num_frames) + 0.5) / clip.fps
    return (np.asarray(starts_s, np.float64)[:, None] + inside).ravel()


def _as_clips(frames: NDArray[np.uint8], clip: ClipField) -> NDArray[np.uint8]:
    if clip.size is not None and frames.shape[1:3] != clip.size:
        frames = np.stack([resize_pixels(frame, clip.size, "bilinear") for frame in frames])
    return frames.reshape(-1, clip.num_frames, *frames.shape[1:])
