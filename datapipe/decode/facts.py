"""What a picture file said about itself."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ImageFacts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFacts:
    """Facts of a file, for the index. Filled while it is decoded, or from its header alone."""

    format: str  # by content, in lower case: "jpeg", "png", ...; MPO is "jpeg"
    mode: str  # Pillow's mode of the stored pixels, before any conversion: "RGB", "CMYK", "I;16", ...
    had_alpha: bool  # transparency of any kind was present and composited
    exif_orientation: int  # 1..8 as stored; 1 when absent or unreadable
    n_frames: int  # frames or pages in the file; pixels are those of the first
    width: int  # pixels, after rotation
    height: int  # pixels, after rotation
    notes: tuple[str, ...]  # metadata that was ignored: "broken_exif", "broken_profile", ...
