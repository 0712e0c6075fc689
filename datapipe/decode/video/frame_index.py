"""Which frames a video has, when each is shown, and where decoding may start to reach it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from datapipe.decode.video.info import VideoInfo
from datapipe.decode.video.opening import OpenVideo
from datapipe.decode.video.packages import import_av
from datapipe.decode.video.packets import PacketLog

__all__ = ["FrameIndex", "index_from_packets"]

# Here the container holds a true presentation time for each packet, and a packet holds one picture.
_INDEXED_CONTAINERS: Final = frozenset({"mp4", "mov", "mkv", "webm"})
_ONE_PICTURE: Final = frozenset({"h264", "hevc", "vp9", "av1", "mpeg4", "mjpeg"})

_MAX_ROUNDING_S: Final = Fraction(1, 2000)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class FrameIndex:
    """Frames in the order of presentation."""

    pts: NDArray[np.int64]  # (F,), increasing, in units of time_base, as the container counts
    zero: int  # pts of time 0
    time_base: Fraction
    entry_pts: NDArray[np.int64]  # (E,), increasing
    can_seek: bool
    has_edits: bool  # an edit list leaves frames out
    has_open_groups: bool  # frames reach across key frames

    @classmethod
    def from_info(cls, info: VideoInfo) -> FrameIndex:
        return cls(
            pts=info.pts + info.zero_pts,
            zero=info.zero_pts,
            time_base=info.facts.time_base,
            entry_pts=info.entry_pts + info.zero_pts,
            can_seek=info.can_seek,
            has_edits=info.num_discarded > 0,
            has_open_groups=info.num_open_entries + info.num_leading > 0,
        )

    def __len__(self) -> int:
        return len(self.pts)

    def entry_before(self, pts: int) -> int:
        """Position among the entry points of the last one that is not after pts; -1 for the start."""
        return int(np.searchsorted(self.entry_pts, pts, side="right")) - 1

    def position_at(self, time_s: float | Fraction) -> int:
        """The frame that is shown at a time; the first before the start, the last after the end.

        Containers round times to their clock, so that a frame counts as shown from half a tick before its
        time on, and at most half a millisecond.
        """
        early = min(self.time_base / 2, _MAX_ROUNDING_S)
        ticks = (Fraction(time_s) + early) / self.time_base
        found = int(np.searchsorted(self.pts - self.zero, float(ticks), side="right")) - 1
        return min(max(found, 0), len(self.pts) - 1)


def index_from_packets(video: OpenVideo) -> FrameIndex | None:
    """Read the times of all packets, without decoding; None where they do not tell the frames for sure.

    The file is left at its end.
    """
    if video.facts.container not in _INDEXED_CONTAINERS or video.facts.codec not in _ONE_PICTURE:
        return None
    log = PacketLog(video.facts.codec, video.stream.codec_context.extradata)
    try:
        for packet in video.container.demux(video.stream):
            if packet.is_corrupt:
                return None
            if packet.size:
                log.add(packet)
    except import_av().error.FFmpegError:
        return None
    if not log.is_indexable or log.num_packets == 0 or len(log.entry_pts) == 0:
        return None
    return FrameIndex(
        pts=log.pts,
        zero=0,
        time_base=video.facts.time_base,
        entry_pts=log.entry_pts,
        can_seek=True,
        has_edits=log.num_discarded > 0,
        has_open_groups=log.num_open_entries + log.num_leading > 0,
    )
