"""One small picture of a video, for reports."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from datapipe.decode.video.reader import VideoReader
from datapipe.decode.video.source import VideoSource

__all__ = ["video_thumbnail"]


def video_thumbnail(source: VideoSource, *, max_side: int = 256, at: float = 0.5) -> NDArray[np.uint8]:
    """Decode one frame and shrink it.

    Args:
        source: The encoded file, or its path.
        max_side: Pixels of the longer side at most; smaller frames keep their size.
        at: Place in the video, 0 (first frame) to 1 (last frame).

    Returns:
        uint8 (H, W, 3) RGB, upright.

    Raises:
        DecodeError: See VideoReader.
    """
    with VideoReader(source) as reader:
        frame = reader.frame(round(at * (len(reader) - 1)))
    picture = Image.fromarray(frame)
    picture.thumbnail((max_side, max_side), Image.Resampling.BILINEAR)
    return np.array(picture)
