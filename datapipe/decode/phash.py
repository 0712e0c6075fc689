"""A perceptual hash: 64 bits that stay nearly the same when a picture is resized or encoded again."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

__all__ = ["perceptual_hash", "phash_distance"]

_SIDE: Final = 32  # pixels that the transform is taken of
_KEPT: Final = 8  # lowest frequencies kept in each direction
_LUMA: Final = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601

# Rows of the orthogonal DCT-II: cos(pi (2x + 1) u / 2N), scaled.
_DCT: Final = np.cos(np.pi * np.outer(np.arange(_KEPT), 2 * np.arange(_SIDE) + 1) / (2 * _SIDE)).astype(
    np.float32
)


def perceptual_hash(pixels: NDArray[np.uint8]) -> str:
    """Hash what a picture looks like.

    The luma is shrunk to 32x32 (antialiased bilinear); of its DCT-II the 8x8 lowest frequencies are kept,
    and each gives the bit "above the median of them all but the first".

    Args:
        pixels: uint8 (H, W) luma or (H, W, 3) RGB, upright.

    Returns:
        16 hexadecimal digits, most significant bit first, row by row. Equal pictures have equal hashes;
        the same picture resized or encoded again differs in a few bits, another one in about 32.
    """
    shrunk = Image.fromarray(pixels).resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
    small = np.asarray(shrunk, np.float32)
    luma = small if small.ndim == 2 else small @ _LUMA
    frequencies = (_DCT @ luma @ _DCT.T).ravel()
    # Of a flat picture only rounding errors are left beside the mean; they must not become bits.
    frequencies[np.abs(frequencies) < 1.0] = 0.0
    bits = frequencies > np.sort(frequencies[1:])[_KEPT * _KEPT // 2 - 1]
    return np.packbits(bits).tobytes().hex()


def phash_distance(first: str, second: str) -> int:
    """Number of bits, 0..64, in which two hashes differ."""
    return (int(first, 16) ^ int(second, 16)).bit_count()
