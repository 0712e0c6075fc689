"""What one full pass over a video found."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

__all__ = ["StreamFacts", "VideoInfo"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamFacts:
    """What is known once the file is open, before any frame is decoded."""

    codec: str  # FFmpeg's name of the coding: "h264", "hevc", "vp9", "av1", "mpeg4", ...
    container: str  # "mp4", "mov", "mkv", "webm", "avi", "mpegts", "mpegps", "ogg", "flv", "asf"
    stored_width: int  # pixels, before any turn
    stored_height: int  # pixels, before any turn
    pixel_format: str  # FFmpeg's name, such as "yuv420p10le"
    header_frames: int  # count that the header claims; 0 when it claims none
    header_fps: float  # rate that the header claims; 0.0 when it claims none
    time_base: Fraction  # seconds of one unit of pts
    has_audio: bool


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class VideoInfo:
    """The truth about a video, filled by scan_video. All counts are of frames that really decode."""

    facts: StreamFacts
    width: int  # pixels, upright
    height: int  # pixels, upright
    rotation: int  # degrees clockwise that were applied: 0, 90, 180, 270
    is_mirrored: bool  # mirrored left to right after the turn
    pts: NDArray[np.int64]  # (F,), presentation times in units of facts.time_base, increasing
    duration_s: float  # from the first frame's start to the last one's end
    fps: float  # frames per second in the mean
    is_vfr: bool  # the frames do not lie on one even grid of times
    damaged: int  # frames with damaged pictures, and those that depend on them up to the next key frame
    zero_pts: int  # what the container's clock shows at time 0
    num_packets: int  # pieces of data that should each have given a frame
    num_discarded: int  # frames that an edit list leaves out
    num_open_entries: int  # key frames that are no place to start decoding at
    num_leading: int  # frames stored after a key frame and shown before it
    can_seek: bool  # decoding may start at `entry_pts`, with the same frames as from the start
    entry_pts: NDArray[np.int64]  # (E,), presentation times of the frames where decoding may start
    notes: tuple[str, ...]  # "header_count_wrong", "edit_list", "times_repaired", "size_changes", ...

    @property
    def frames(self) -> int:
        """Number of frames that decode."""
        return len(self.pts)

    @property
    def codec(self) -> str:
        return self.facts.codec

    @property
    def container(self) -> str:
        return self.facts.container

    @property
    def header_frames(self) -> int:
        return self.facts.header_frames

    @property
    def has_audio(self) -> bool:
        return self.facts.has_audio

    @property
    def damaged_fraction(self) -> float:
        """Share of frames that are damaged or depend on damaged ones, 0..1."""
        return self.damaged / max(1, len(self.pts))

    @property
    def times(self) -> NDArray[np.float64]:
        """Presentation times in seconds, float64 (F,)."""
        return self.pts.astype(np.float64) * np.float64(self.facts.time_base)

    def presentation_time(self, index: int) -> Fraction:
        """Exact time in seconds at which a frame is shown."""
        return int(self.pts[index]) * self.facts.time_base
