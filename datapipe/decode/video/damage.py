"""How much of a video is damaged, or not there at all."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from datapipe.decode.video.opening import OpenVideo
from datapipe.decode.video.packets import PacketLog

__all__ = ["count_damaged", "known_times", "lost_packets", "missing_at_end"]


def known_times(times: list[int | None]) -> list[int]:
    """Those that are there."""
    return [time for time in times if time is not None]


def lost_packets(log: PacketLog, pts: NDArray[np.int64]) -> list[int]:
    """Times of packets that gave no frame. Those before the first frame, and one at the very end, which
    is how a count one too high in the header looks, are no damage to the frames that are there."""
    missing = np.setdiff1d(log.pts, pts)
    missing = missing[missing > pts[0]]
    if (missing > pts[-1]).sum() == 1:
        missing = missing[:-1]
    return known_times(missing.tolist())


def count_damaged(
    pts: NDArray[np.int64], entries: NDArray[np.int64], damaged: list[int], lost: list[int]
) -> int:
    """Count damaged frames and all that follow them up to the next entry point."""
    bad = np.zeros(len(pts), dtype=bool)
    starts = [*damaged, *np.searchsorted(pts, lost).tolist()]
    for start in starts:
        if start >= len(pts):
            continue
        later = entries[entries > pts[start]]
        stop = int(np.searchsorted(pts, later.min())) if len(later) else len(pts)
        bad[start:stop] = True
    missing_at_end = sum(start >= len(pts) for start in starts)
    return int(bad.sum() + missing_at_end)


def missing_at_end(video: OpenVideo, pts: NDArray[np.int64], zero: int) -> int:
    """Frames that the declared length of a Matroska track has room for after the last one. Its readers
    pass over damaged clusters in silence."""
    if video.facts.container not in ("mkv", "webm") or len(pts) < 2:
        return 0
    declared = _declared_s(video)
    mean_s = float((pts[-1] - pts[0]) * video.facts.time_base) / (len(pts) - 1)
    end_s = float((pts[-1] + zero) * video.facts.time_base) + mean_s
    missing = int((declared - end_s) / mean_s + 0.5)
    return missing if missing > max(1, len(pts) // 50) else 0


def _declared_s(video: OpenVideo) -> float:
    text = video.stream.metadata.get("DURATION", "")
    try:
        hours, minutes, seconds = text.split(":")
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    except ValueError:
        is_alone = len(video.container.streams) == 1
        return (video.container.duration or 0) / 1e6 if is_alone else 0.0
