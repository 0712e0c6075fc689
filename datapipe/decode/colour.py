"""Right colours: every Pillow mode, embedded profiles and transparency become 8-bit sRGB."""

from __future__ import annotations

import io
from typing import Final

import numpy as np
from PIL import Image, ImageCms

from datapipe.decode.tiff_samples import tagged_grey

__all__ = ["has_alpha", "to_rgb"]

_ALPHA_MODES: Final = frozenset({"RGBA", "LA", "PA", "La", "RGBa"})
_NO_DIRECT_WAY: Final = {"PA": "RGBA", "La": "LA", "RGBa": "RGBA"}
_PROFILE_MODES: Final = {"RGB": "RGB ", "L": "GRAY", "CMYK": "CMYK"}


def has_alpha(image: Image.Image) -> bool:
    """Whether the file carries transparency: a channel, a palette entry or a colour key."""
    return image.mode in _ALPHA_MODES or "transparency" in image.info


def to_rgb(image: Image.Image, *, background: tuple[int, int, int]) -> tuple[Image.Image, bool]:
    """Convert a loaded picture of any mode to RGB.

    Wide modes are scaled to 8 bits: `I;16` by 257 (or by the bits that a TIFF names), a PGM by its largest
    value; other `I` and `F` by the smallest of the full scales 1 (float only), 255, 65535, 2^32-1 that holds
    their largest value. Negative values and NaN become 0. A TIFF whose 0 is white is turned over.
    CMYK samples of a JPEG are read as Adobe writes them (inverted), with or without the marker, as
    browsers do. An embedded ICC profile other than sRGB is applied. Transparency is composited.

    Args:
        image: Loaded, one frame.
        background: RGB 0..255 that shows through where the picture is transparent.

    Returns:
        The RGB picture, and whether an embedded profile had to be ignored because it is broken.
    """
    image = _palette_to_direct(image)
    if image.mode.startswith("I") or image.mode == "F":
        return _wide_to_rgb(image, background)
    image, is_profile_broken = _apply_profile(image)
    if has_alpha(image):
        over = image.convert("RGBA")
        ground = Image.new("RGBA", over.size, (*background, 255))
        return Image.alpha_composite(ground, over).convert("RGB"), is_profile_broken
    return (image if image.mode == "RGB" else image.convert("RGB")), is_profile_broken


def _palette_to_direct(image: Image.Image) -> Image.Image:
    if image.mode in _NO_DIRECT_WAY:
        return image.convert(_NO_DIRECT_WAY[image.mode])
    if image.mode == "P":
        profile = image.info.get("icc_profile")
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
        if profile:
            image.info["icc_profile"] = profile
    return image


def _wide_to_rgb(image: Image.Image, background: tuple[int, int, int]) -> tuple[Image.Image, bool]:
    samples, full_scale, is_inverted = tagged_grey(image, np.asarray(image))
    values = np.nan_to_num(samples.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    if full_scale is None and (image.mode.startswith("I;16") or (image.format, image.mode) == ("PPM", "I")):
        full_scale = 65535.0  # Pillow stretches a PGM of any wide range to it
    if full_scale is None:
        full_scale = _full_scale(float(values.max(initial=0.0)), is_float=image.mode == "F")
    grey = np.clip(np.rint(values * (255.0 / full_scale)), 0, 255).astype(np.uint8)
    narrow = Image.fromarray(255 - grey if is_inverted else grey)
    narrow.info["icc_profile"] = image.info.get("icc_profile")
    narrow, is_profile_broken = _apply_profile(narrow)
    rgb = np.array(narrow.convert("RGB"))
    key = image.info.get("transparency")
    if isinstance(key, int):
        rgb[values == key] = background
    return Image.fromarray(rgb), is_profile_broken


def _full_scale(largest: float, *, is_float: bool) -> float:
    scales = (1.0, 255.0, 65535.0) if is_float else (255.0, 65535.0)
    return next((scale for scale in scales if largest <= scale), float(2**32 - 1))


def _apply_profile(image: Image.Image) -> tuple[Image.Image, bool]:
    data = image.info.get("icc_profile")
    if not isinstance(data, bytes) or not data or b"sRGB" in data[:1024] or _is_srgb_utf16(data):
        return image, False
    colours = "RGB" if image.mode == "RGBA" else "L" if image.mode == "LA" else image.mode
    if colours not in _PROFILE_MODES:
        return image, False
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(data))
        if profile.profile.xcolor_space != _PROFILE_MODES[colours]:
            return image, True
        plain = image if image.mode == colours else image.convert(colours)
        converted = ImageCms.profileToProfile(plain, profile, _srgb(), outputMode="RGB")
    except (OSError, TypeError, ValueError, ImageCms.PyCMSError):
        return image, True
    if converted is None:
        return image, True
    if has_alpha(image):
        converted.putalpha(image.convert("RGBA").getchannel("A"))
    return converted, False


def _is_srgb_utf16(data: bytes) -> bool:
    return "sRGB".encode("utf-16-be") in data[:1024]


def _srgb() -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
