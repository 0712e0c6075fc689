"""Which frames a video has, when each is shown, and where decoding may start to reach it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from datapipe.decode.video.boxes import composition_offsets
from datapipe.decode.video.info import VideoInfo
from datapipe.decode.video.opening import OpenVideo
from datapipe.decode.video.packages import import_av
from datapipe.decode.video.packets import PacketLog

__all__ = ["FrameIndex", "index_from_packets"]

# Here the container holds a true presentation time for each packet, and a packet holds one picture.
_INDEXED_CONTAINERS: Final = frozenset({"mp4", "mov", "mkv", "webm"})
_ONE_PICTURE: Final = frozenset({"h264", "hevc", "vp9", "av1", "mpeg4", "mjpeg"})

_HEAD_BYTES: Final = 4096
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
        """The index of a video that was scanned."""
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


def index_from_packets(video: OpenVideo, *, use_tables: bool = True) -> FrameIndex | None:
    """Learn the times of all packets, without decoding; None where they do not tell the frames for sure.

    Args:
        video: Open file. It is left at its end if all packets have to be read.
        use_tables: Whether the tables of an MP4 are enough, which tell the times at once. They leave out
            key frames that are no place to start at, which has_open_groups then does not count.
    """
    if video.facts.container not in _INDEXED_CONTAINERS or video.facts.codec not in _ONE_PICTURE:
        return None
    position = video.file.tell()
    log = _log_from_tables(video) if use_tables else None
    video.file.seek(position)  # FFmpeg counts on finding the file where it left it
    log = log or _log_from_packets(video)
    if log is None or not log.is_indexable or log.num_packets == 0 or len(log.entry_pts) == 0:
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


def _log_from_tables(video: OpenVideo) -> PacketLog | None:
    """The log that reading all packets would give, from FFmpeg's index of decoding times and the table of
    offsets to presentation times, which that index leaves out. None where they do not fit together."""
    if video.facts.container not in ("mp4", "mov"):
        return None
    samples = video.stream.index_entries
    offsets = composition_offsets(video.file, video.size_bytes)
    if len(samples) == 0 or len(offsets) != len(samples):
        return None
    shift = max(0, -int(offsets.min()))  # FFmpeg moves decoding times back, so that no offset is negative
    log = PacketLog(video.facts.codec, video.stream.codec_context.extradata)
    for sample, offset in zip(samples, offsets.tolist()):
        if sample.pos + sample.size > video.size_bytes:
            return None
        read = partial(_read_head, video.file, sample.pos, sample.size)
        log.add(sample.timestamp + shift + offset, sample.is_keyframe, sample.is_discard, read)
    return log


def _read_head(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(min(size, _HEAD_BYTES))


def _log_from_packets(video: OpenVideo) -> PacketLog | None:
    log = PacketLog(video.facts.codec, video.stream.codec_context.extradata)
    try:
        for packet in video.container.demux(video.stream):
            if packet.is_corrupt:
                return None
            if packet.size:
                log.add_packet(packet)
    except import_av().error.FFmpegError:
        return None
    return log
