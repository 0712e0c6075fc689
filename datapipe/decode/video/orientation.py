"""The display matrix of a video track: a turn and a mirror that players apply, and most decoders do not."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["UPRIGHT", "Orientation", "parse_display_matrix"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Orientation:
    """How stored pixels become upright: first turned clockwise, then mirrored left to right."""

    rotation: int = 0  # degrees clockwise: 0, 90, 180, 270
    is_mirrored: bool = False

    @property
    def swaps_axes(self) -> bool:
        return self.rotation in (90, 270)

    def apply(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Turn uint8 (H, W, 3); the result is a view unless nothing has to be done."""
        turned = np.rot90(pixels, -(self.rotation // 90))
        return turned[:, ::-1] if self.is_mirrored else turned


UPRIGHT: Final = Orientation()


def parse_display_matrix(data: bytes | memoryview) -> Orientation:
    """Read the 3x3 matrix of ISO/IEC 14496-12 (8.3.2, and FFmpeg's display matrix): int32 (3, 3), native
    byte order; a picture point (x, y) is shown at (a x + c y, b x + d y).

    A turn that is no multiple of 90 degrees is taken to the nearest one; a matrix without any turn in it
    counts as upright.
    """
    if len(data) < 36:
        return UPRIGHT
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(data[:36]))
    if abs(a) + abs(d) >= abs(b) + abs(c):
        if a == 0 or d == 0:
            return UPRIGHT
        rotation = 0 if d > 0 else 180
        return Orientation(rotation=rotation, is_mirrored=(a > 0) != (d > 0))
    if b == 0 or c == 0:
        return UPRIGHT
    # b > 0 sends the x axis down, c < 0 sends the y axis to the left: a quarter turn clockwise.
    rotation = 90 if b > 0 else 270
    return Orientation(rotation=rotation, is_mirrored=(b > 0) == (c > 0))
