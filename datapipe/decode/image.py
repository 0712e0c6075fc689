"""Bytes to upright RGB pixels, with facts about the file. Nothing global in Pillow is changed."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from datapipe.decode.colour import has_alpha, to_rgb
from datapipe.decode.exif import METADATA_ERRORS, apply_orientation, read_orientation
from datapipe.decode.png_chunks import check_png_chunks
from datapipe.decode.sniff import sniff_image_format
from datapipe.errors import DataError, DecodeError

__all__ = [
    "DEFAULT_MAX_PIXELS",
    "WHITE",
    "ImageFacts",
    "check_image",
    "decode_image",
    "decode_image_with_facts",
]

DEFAULT_MAX_PIXELS: Final = 89_478_485
WHITE: Final = (255, 255, 255)

_PIXEL_ERRORS: Final = (*METADATA_ERRORS, EOFError, MemoryError, Image.DecompressionBombError)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFacts:
    """What the file said about itself. Goes into the index; filled by decode_image_with_facts."""

    format: str  # by content, in lower case: "jpeg", "png", ...; MPO is "jpeg"
    mode: str  # Pillow's mode of the stored pixels, before any conversion: "RGB", "CMYK", "I;16", ...
    had_alpha: bool  # transparency of any kind was present and composited
    exif_orientation: int  # 1..8 as stored; 1 when absent or unreadable
    n_frames: int  # frames or pages in the file; pixels are those of the first
    width: int  # pixels, after rotation
    height: int  # pixels, after rotation
    notes: tuple[str, ...]  # metadata that was ignored: "broken_exif", "broken_profile"


def decode_image(
    data: bytes | memoryview,
    *,
    size: tuple[int, int] | None = None,
    background: tuple[int, int, int] = WHITE,
    max_pixels: int = DEFAULT_MAX_PIXELS,
) -> NDArray[np.uint8]:
    """Decode a picture completely, upright and in RGB.

    Args:
        data: The encoded file. The format is told by content.
        size: (height, width) in pixels wanted. A picture of that size keeps its exact pixels; another is
            resized with Pillow's bilinear filter, which averages over the whole footprint of each new
            pixel when it shrinks (antialiased). The aspect ratio is not kept. None keeps the size.
        background: RGB 0..255 behind transparent pixels.
        max_pixels: Pictures whose header claims more are refused before any pixel is decoded.

    Returns:
        Writable uint8 (H, W, 3).

    Raises:
        DecodeError: With a reason code; see decode_image_with_facts.
    """
    image, _ = _decode(data, background=background, max_pixels=max_pixels)
    if size is not None and (image.height, image.width) != size:
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.array(image, dtype=np.uint8)


def decode_image_with_facts(
    data: bytes | memoryview,
    *,
    background: tuple[int, int, int] = WHITE,
    max_pixels: int = DEFAULT_MAX_PIXELS,
) -> tuple[NDArray[np.uint8], ImageFacts]:
    """Decode like decode_image, at full size, and tell the facts of the file.

    Raises:
        DecodeError: Reasons `empty`, `html`, `json`, `svg`, `pdf`, `archive`, `video`, `lfs_pointer`,
            `unsupported_format`, `not_an_image` (by content), `missing_codec`, `too_many_pixels` (by
            header), `truncated`, `corrupt`, `out_of_memory` (by pixels).
    """
    image, facts = _decode(data, background=background, max_pixels=max_pixels)
    return np.array(image, dtype=np.uint8), facts


def check_image(data: bytes | memoryview, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> ImageFacts:
    """Decode completely like decode_image, keep the facts only.

    Raises:
        DecodeError: See decode_image_with_facts.
    """
    return _decode(data, background=WHITE, max_pixels=max_pixels)[1]


def _decode(
    data: bytes | memoryview, *, background: tuple[int, int, int], max_pixels: int
) -> tuple[Image.Image, ImageFacts]:
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise DataError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is on in this process, so that cut files would pass as "
            "whole pictures with grey areas; set it to False"
        )
    format_name = sniff_image_format(data)
    if format_name == "PNG":
        check_png_chunks(data)
    with _open(data, format_name) as image:
        _check_pixels(image, max_pixels)
        mode, alpha = image.mode, has_alpha(image)
        num_frames = _count_frames(image, format_name)
        orientation, is_exif_broken = read_orientation(image)
        _load(image, data, format_name)
        # Pillow's TIFF reader turns the pixels while it loads; every other reader leaves them.
        is_upright = format_name == "TIFF"
        rgb, is_profile_broken = _to_rgb(image, background)
    if not is_upright:
        rgb = apply_orientation(rgb, orientation)
    notes = [
        name for name, on in (("broken_exif", is_exif_broken), ("broken_profile", is_profile_broken)) if on
    ]
    facts = ImageFacts(
        format=format_name.lower(),
        mode=mode,
        had_alpha=alpha,
        exif_orientation=orientation,
        n_frames=num_frames,
        width=rgb.width,
        height=rgb.height,
        notes=tuple(notes),
    )
    return rgb, facts


def _open(data: bytes | memoryview, format_name: str) -> Image.Image:
    formats = [format_name]
    if format_name == "JPEG":
        formats.append("MPO")
    Image.init()
    if format_name not in Image.OPEN:
        package = (
            "pillow-heif (and call pillow_heif.register_heif_opener())"
            if format_name == "HEIF"
            else "a codec"
        )
        raise DecodeError("missing_codec", f"this Pillow cannot read {format_name}; install {package}")
    try:
        return Image.open(io.BytesIO(data), formats=formats)
    except Image.DecompressionBombError as error:
        raise DecodeError("too_many_pixels", str(error)) from error
    except _PIXEL_ERRORS as error:
        reason = "truncated" if _is_cut(data, format_name) else "corrupt"
        raise DecodeError(reason, f"the {format_name} header cannot be read: {error}") from error


def _check_pixels(image: Image.Image, max_pixels: int) -> None:
    pixels = image.width * image.height
    if pixels > max_pixels:
        raise DecodeError(
            "too_many_pixels",
            f"the header claims {image.width}x{image.height} = {pixels} pixels, the budget is {max_pixels}; "
            "raise max_pixels or shrink the picture",
        )


def _load(image: Image.Image, data: bytes | memoryview, format_name: str) -> None:
    try:
        image.load()
    except Image.DecompressionBombError as error:
        raise DecodeError("too_many_pixels", str(error)) from error
    except _PIXEL_ERRORS as error:
        is_cut = "truncated" in str(error).lower() or _is_cut(data, format_name)
        reason = "truncated" if is_cut else "corrupt"
        if isinstance(error, MemoryError):
            reason = "out_of_memory"
        raise DecodeError(reason, f"{format_name} of {len(data)} bytes: {error}") from error


def _to_rgb(image: Image.Image, background: tuple[int, int, int]) -> tuple[Image.Image, bool]:
    try:
        return to_rgb(image, background=background)
    except _PIXEL_ERRORS as error:
        raise DecodeError("corrupt", f"mode {image.mode} cannot be converted to RGB: {error}") from error


def _is_cut(data: bytes | memoryview, format_name: str) -> bool:
    """Whether the container itself shows that its end is missing."""
    if format_name == "JPEG":
        return b"\xff\xd9" not in bytes(data[-4096:])
    if format_name == "PNG":
        return b"IEND" not in bytes(data[-4096:])
    if format_name == "WEBP":
        return len(data) < int.from_bytes(bytes(data[4:8]), "little") + 8
    return len(data) < 64


def _count_frames(image: Image.Image, format_name: str) -> int:
    if format_name == "ICO":
        return 1
    try:
        return int(getattr(image, "n_frames", 1))
    except METADATA_ERRORS:
        return 1
