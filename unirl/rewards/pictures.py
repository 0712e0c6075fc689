"""Pictures of any size and shape, brought to the one size that a reward model sees."""

from __future__ import annotations

import numpy as np
from PIL import Image

__all__ = ["MAX_ASPECT", "fit_picture", "picture_problem"]

MAX_ASPECT = 200
"""Longest side over shortest that Qwen2.5-VL's picture processor takes."""
PADDING = 128


def picture_problem(picture: np.ndarray) -> str | None:
    """Say in words why a picture cannot be scored, or None."""
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        return f"picture is {picture.dtype} {picture.shape}, wanted uint8 (rows, columns, 3)"
    rows, columns = picture.shape[:2]
    if min(rows, columns) < 1:
        return f"picture is {columns}x{rows}, it has no pixels"
    if max(rows, columns) > MAX_ASPECT * min(rows, columns):
        return f"picture is {columns}x{rows}, sides differ more than {MAX_ASPECT} times"
    return None


def fit_picture(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Scale a picture to fit into (rows, columns), keep its shape, pad the rest with grey on both sides.

    Args:
        picture: Uint8 (H, W, 3).

    Returns:
        Uint8 (rows, columns, 3). A picture that has the size already is handed back as it is.
    """
    if picture.shape[:2] == size:
        return picture
    scale = min(size[0] / picture.shape[0], size[1] / picture.shape[1])
    rows, columns = (max(1, round(side * scale)) for side in picture.shape[:2])
    resized = Image.fromarray(picture).resize((columns, rows), Image.Resampling.BICUBIC)
    fitted = np.full((*size, 3), PADDING, np.uint8)
    top, left = (size[0] - rows) // 2, (size[1] - columns) // 2
    fitted[top : top + rows, left : left + columns] = np.asarray(resized)
    return fitted
