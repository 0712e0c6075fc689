"""What is refused before a pixel is decoded, whichever way that would be."""

from __future__ import annotations

import sys

from datapipe.errors import DataError, DecodeError

__all__ = ["check_pixel_budget", "refuse_switch"]


def refuse_switch() -> None:
    """Refuse to decode while Pillow fills cut pictures with grey.

    Raises:
        DataError: If the process-wide switch is on.
    """
    # A module that was not imported has its switch off.
    if getattr(sys.modules.get("PIL.ImageFile"), "LOAD_TRUNCATED_IMAGES", False):
        raise DataError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is on in this process, so that cut files would pass as "
            "whole pictures with grey areas; set it to False"
        )


def check_pixel_budget(width: int, height: int, max_pixels: int, num_frames: int = 1) -> None:
    """Refuse what the header claims when it is too much.

    Raises:
        DecodeError: Reason `too_many_pixels`.
    """
    pixels = width * height * num_frames
    if pixels > max_pixels:
        claim = f"{width}x{height}" + (f" in {num_frames} frames" if num_frames > 1 else "")
        raise DecodeError(
            "too_many_pixels",
            f"the header claims {claim} = {pixels} pixels, the budget is {max_pixels}; "
            "raise max_pixels or shrink the picture",
        )
