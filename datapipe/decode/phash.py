"""A perceptual hash: 64 bits that stay nearly the same when a picture is resized or encoded again."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["perceptual_hash", "phash_distance"]

_SIDE: Final = 32  # pixels that the transform is taken of
_KEPT: Final = 8  # lowest frequencies kept in each direction
_LARGEST: Final = 160  # longer sides are shrunk by Pillow first


def perceptual_hash(pixels: NDArray[np.uint8], *, extent: tuple[float, float] | None = None) -> str:
    """Hash what a picture looks like.

    The luma is shrunk to 32x32 (antialiased bilinear); of its DCT-II the 8x8 lowest frequencies are kept,
    and each gives the bit "above the median of them all but the first".

    Args:
        pixels: uint8 (H, W) luma or (H, W, 3) RGB, upright.
        extent: (height, width) in pixels of the part from the upper left corner that is meant; None for all.

    Returns:
        16 hexadecimal digits, most significant bit first, row by row. Equal pictures have equal hashes;
        the same picture resized or encoded again differs in a few bits, another one in about 32.
    """
    from PIL import Image

    luma = pixels if pixels.ndim == 2 else np.asarray(Image.fromarray(pixels).convert("L"))
    height, width = luma.shape if extent is None else extent
    if max(luma.shape) > _LARGEST:
        size = (min(luma.shape[1], _LARGEST), min(luma.shape[0], _LARGEST))
        box = (0.0, 0.0, width, height)
        luma = np.asarray(Image.fromarray(luma).resize(size, Image.Resampling.BILINEAR, box=box))
        height, width = luma.shape
    rows, columns = _transform(luma.shape[0], height), _transform(luma.shape[1], width)
    # einsum and sorted: after a decode the first call of BLAS, or of numpy's own sort, costs more than these.
    shrunk = np.einsum("uy,yx->ux", rows, luma.astype(np.float32))
    frequencies = np.einsum("ux,vx->uv", shrunk, columns).ravel()
    # Of a flat picture only rounding errors are left beside the mean; they must not become bits.
    frequencies[np.abs(frequencies) < 1.0] = 0.0
    bits = frequencies > sorted(frequencies[1:].tolist())[_KEPT * _KEPT // 2 - 1]
    return np.packbits(bits).tobytes().hex()


@lru_cache(maxsize=1024)
def _transform(length: int, extent: float) -> NDArray[np.float32]:
    """Shrinking to 32 values and their lowest frequencies in one matrix, float32 (8, length)."""
    scale = extent / _SIDE
    centres = (np.arange(_SIDE) + 0.5) * scale
    distances = np.abs(np.arange(length) + 0.5 - centres[:, None])
    weights = np.maximum(0.0, 1.0 - distances / max(scale, 1.0))
    weights /= weights.sum(axis=1, keepdims=True)
    # Rows of the orthogonal DCT-II without its factors: cos(pi (2x + 1) u / 2N).
    cosines = np.cos(np.pi * np.outer(np.arange(_KEPT), 2 * np.arange(_SIDE) + 1) / (2 * _SIDE))
    coefficients: NDArray[np.float32] = (cosines @ weights).astype(np.float32)
    return coefficients


def phash_distance(first: str, second: str) -> int:
    """Number of bits, 0..64, in which two hashes differ."""
    return (int(first, 16) ^ int(second, 16)).bit_count()
