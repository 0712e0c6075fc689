"""Changing the size of pixels, with the filters of Pillow."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from datapipe.errors import DataError

__all__ = ["Resample", "check_resample", "resize_pixels"]

Resample = Literal["bilinear", "bicubic", "lanczos", "box", "linear", "nearest"]

_FILTERS: Final = frozenset(get_args(Resample))
_OF_PILLOW: Final = frozenset(("lanczos", "box", "nearest"))


def check_resample(resample: str) -> None:
    """Raise DataError unless resample names a filter."""
    if resample not in _FILTERS:
        raise DataError(f"resample is {resample!r}, wanted one of {', '.join(get_args(Resample))}")


def resize_pixels(
    pixels: NDArray[np.uint8],
    size: tuple[int, int],
    resample: Resample = "bilinear",
    *,
    extent: tuple[float, float] | None = None,
    out: NDArray[np.uint8] | None = None,
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
        out: uint8 (height, width, 3), C-contiguous. Where the result is computed anew by torch's kernels, it
            is written there and `out` is returned; else it is left as it is.

    Returns:
        Writable uint8 (height, width, 3), C-contiguous; the argument itself when it has that size.
    """
    whole = (float(pixels.shape[0]), float(pixels.shape[1]))
    extent = extent or whole
    if pixels.shape[:2] == size and extent == whole:
        return pixels
    if resample in _OF_PILLOW:
        from PIL import Image

        box = (0.0, 0.0, extent[1], extent[0])
        kernel = Image.Resampling[resample.upper()]
        return np.array(Image.fromarray(pixels).resize((size[1], size[0]), kernel, box=box))
    torch, operators = _kernels()
    readable = pixels if pixels.flags.c_contiguous and pixels.flags.writeable else pixels.copy()
    resized = np.empty((*size, 3), np.uint8) if out is None else out
    source, target = (torch.from_numpy(array[None]).permute(0, 3, 1, 2) for array in (readable, resized))
    operators[resample](source, size, False, size[0] / extent[0], size[1] / extent[1], out=target)
    return resized


@lru_cache(maxsize=1)
def _kernels() -> tuple[ModuleType, dict[Resample, Callable[..., object]]]:
    """torch, which is imported only where pictures are resized, and what shrinks with it."""
    import torch

    # The operators behind torch.nn.functional.interpolate: that one returns planes, which costs another pass.
    return torch, {
        "bilinear": torch.ops.aten._upsample_bilinear2d_aa.out,
        "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out,
        "linear": torch.ops.aten.upsample_bilinear2d.out,
    }
