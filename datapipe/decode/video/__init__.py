"""Videos: one scan at ingest, and exact frames by time or index."""

from __future__ import annotations

from datapipe.decode.video.container import Container, sniff_container
from datapipe.decode.video.info import StreamFacts, VideoInfo
from datapipe.decode.video.reader import Backend, VideoReader
from datapipe.decode.video.scan import DEFAULT_MAX_DAMAGED, scan_video
from datapipe.decode.video.source import VideoSource
from datapipe.decode.video.thumbnail import video_thumbnail
from datapipe.errors import MissingExtraError

__all__ = [
    "DEFAULT_MAX_DAMAGED",
    "Backend",
    "Container",
    "MissingExtraError",
    "StreamFacts",
    "VideoInfo",
    "VideoReader",
    "VideoSource",
    "scan_video",
    "sniff_container",
    "video_thumbnail",
]
