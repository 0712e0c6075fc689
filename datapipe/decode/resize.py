"""Changing the size of pixels, with the filters of Pillow."""

from __future__ import annotations

from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from datapipe.errors import DataError

__all__ = ["Resample", "check_resample", "resize_pixels"]

Resample = Literal["bilinear", "bicubic", "lanczos", "box", "linear", "nearest"]

_PILLOW: Final = {
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "nearest": Image.Resampling.NEAREST,
}


def check_resample(resample: str) -> None:
    """Raise DataError unless resample names a filter."""
    if resample not in get_args(Resample):
        raise DataError(f"resample is {resample!r}, wanted one of {', '.join(get_args(Resample))}")


def resize_pixels(
    pixels: NDArray[np.uint8],
    size: tuple[int, int],
    resample: Resample = "bilinear",
    *,
    extent: tuple[float, float] | None = None,
) -> NDArray[np.uint8]:
    """Resize; the aspect ratio is not kept.

    `bilinear`, `bicubic`, `lanczos` and `box` average over the whole footprint of each new pixel when they
    shrink (antialiased). `linear` and `nearest` do not: they are there to match what other pipelines did.
    The first two and `linear` are computed by torch's kernels, which differ from Pillow's by at most one
    grey level and are several times as fast.

    Args:
        pixels: uint8 (H, W, 3).
        size: (height, width) wanted.
        resample: The filter.
        extent: (height, width) in pixels of the part, from the upper left corner, that is wanted. The last
            row and column may be in it with a share only. None for all.

    Returns:
        Writable uint8 (height, width, 3), C-contiguous; the argument itself when it has that size.
    """
    whole = (float(pixels.shape[0]), float(pixels.shape[1]))
    extent = extent or whole
    if pixels.shape[:2] == size and extent == whole:
        return pixels
    if resample in _PILLOW:
        box = (0.0, 0.0, extent[1], extent[0])
        return np.array(Image.fromarray(pixels).resize((size[1], size[0]), _PILLOW[resample], box=box))
    import torch  # needed only where pictures are resized

    readable = pixels if pixels.flags.c_contiguous and pixels.flags.writeable else pixels.copy()
    planes = torch.from_numpy(readable).permute(2, 0, 1)[None]
    # The size follows from the factors by rounding down, which the small addition makes safe.
    factors = None if extent == whole else [(n + 1e-4) / length for n, length in zip(size, extent)]
    resized = torch.nn.functional.interpolate(
        planes,
        size=None if factors else size,
        scale_factor=factors,
        mode="bicubic" if resample == "bicubic" else "bilinear",
        antialias=resample != "linear",
    )
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())
