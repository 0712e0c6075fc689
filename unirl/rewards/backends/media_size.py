"""Pictures and clips as a vision-language model takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from unirl.rewards.backends.base import VlmRequest
from unirl.rewards.pictures import MAX_ASPECT

__all__ = ["as_clip", "media_problem", "medium_problem"]


def medium_problem(medium: np.ndarray, *, max_pixels: int) -> str | None:
    """Say in words why a picture or clip cannot be looked at, or None."""
    if medium.dtype != np.uint8 or medium.ndim not in (3, 4) or medium.shape[-1] != 3:
        return f"found {medium.dtype} {medium.shape}, wanted uint8 (rows, columns, 3), of a clip with frames"
    rows, columns = medium.shape[-3:-1]
    if min(medium.shape) < 1:
        return f"{columns}x{rows} and {medium.shape[0]} frames: it has no pixels"
    if max(rows, columns) > MAX_ASPECT * min(rows, columns):
        return f"{columns}x{rows}: sides differ more than {MAX_ASPECT} times"
    if rows * columns > max_pixels:
        return f"{columns}x{rows}: more than {max_pixels} pixels; scale it down"
    return None


def media_problem(
    request: VlmRequest, ids: Sequence[int], picture_id: int, clip_id: int, *, max_pixels: int
) -> str | None:
    """Say in words why the media of a request cannot be shown, or None.

    Args:
        request: The question.
        ids: It as tokens, one placeholder for each medium.
        picture_id: Placeholder of pictures.
        clip_id: Placeholder of clips.
        max_pixels: Largest picture.
    """
    for number, medium in enumerate([*request.images, *request.clips], start=1):
        if (problem := medium_problem(medium, max_pixels=max_pixels)) is not None:
            return f"picture {number}: {problem}"
    if (ids.count(picture_id), ids.count(clip_id)) != (len(request.images), len(request.clips)):
        return "placeholder: the words of the request hold the placeholder of a picture"
    return None


def as_clip(medium: np.ndarray, cell: int) -> np.ndarray:
    """Picture or clip as uint8 (F, H, W, 3), scaled to sides that are multiples of `cell` if they are not."""
    frames = medium if medium.ndim == 4 else medium[None]
    sides = tuple(max(1, round(side / cell)) * cell for side in frames.shape[1:3])
    if sides == frames.shape[1:3]:
        return frames
    size = (sides[1], sides[0])
    return np.stack([np.asarray(Image.fromarray(f).resize(size, Image.Resampling.BICUBIC)) for f in frames])
