"""Bytes to upright RGB pixels, with facts about the file. Nothing global in Pillow is changed.

Pillow, and what goes by it, is imported when the first file comes up that needs it: it is a sixth of what
importing a loader would take, and ordinary JPEGs do without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from datapipe.decode.exif import swaps_axes
from datapipe.decode.facts import ImageFacts
from datapipe.decode.jpeg import (
    JpegHeader,
    check_jpeg,
    decode_jpeg,
    decode_jpeg_resized,
    orient_pixels,
    read_jpeg_header,
    scaled_extent,
)
from datapipe.decode.phash import perceptual_hash
from datapipe.decode.png_chunks import check_png_chunks
from datapipe.decode.refusals import check_pixel_budget, refuse_switch
from datapipe.decode.resize import Resample, check_resample, resize_pixels
from datapipe.decode.sniff import sniff_image_format
from datapipe.decode.spared import pixels_alone, read_past_metadata

__all__ = [
    "DEFAULT_MAX_PIXELS",
    "WHITE",
    "check_image",
    "decode_frames",
    "decode_image",
    "decode_image_with_facts",
    "read_image_facts",
]

DEFAULT_MAX_PIXELS: Final = 89_478_485
WHITE: Final = (255, 255, 255)


def decode_image(
    data: bytes | memoryview,
    *,
    size: tuple[int, int] | None = None,
    resample: Resample = "bilinear",
    background: tuple[int, int, int] = WHITE,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """Decode a picture completely, upright and in RGB.

    Ordinary JPEGs are decoded by libjpeg-turbo directly, everything else by Pillow, to the same pixels.

    Args:
        data: The encoded file. The format is told by content.
        size: (height, width) in pixels wanted. A picture of that size keeps its exact pixels; another is
            resized. The aspect ratio is not kept. None keeps the size. A JPEG that shrinks is decoded by
            a faster transform, and one of three times the size or more to a smaller size right away. That
            changes the result by about one grey level in the mean, two at most.
        resample: Filter of the resizing, antialiased by default; see resize_pixels.
        background: RGB 0..255 behind transparent pixels.
        max_pixels: Pictures whose header claims more are refused before any pixel is decoded.
        out: uint8 (height, width, 3) of `size`, C-contiguous. A picture whose last step is a resizing is
            written there without a copy, and `out` is returned. After an error its content is anything.

    Returns:
        Writable uint8 (H, W, 3).

    Raises:
        DecodeError: With a reason code; see decode_image_with_facts.
    """
    check_resample(resample)
    refuse_switch()
    format_name = sniff_image_format(data)
    header = _ordinary_jpeg(data, format_name, max_pixels)
    if header is None:
        pixels, _ = _decode_carefully(data, format_name, background, max_pixels)
        return pixels if size is None else resize_pixels(pixels, size, resample, out=out)
    if size is None:
        stored = decode_jpeg(data)
    else:
        stored_size = size[::-1] if swaps_axes(header.orientation) else size
        placed = out if header.orientation == 1 else None
        stored = decode_jpeg_resized(data, header, stored_size, resample, out=placed)
    return np.ascontiguousarray(orient_pixels(stored, header.orientation))


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
    refuse_switch()
    format_name = sniff_image_format(data)
    header = _ordinary_jpeg(data, format_name, max_pixels)
    if header is None:
        return _decode_carefully(data, format_name, background, max_pixels)
    pixels = orient_pixels(decode_jpeg(data), header.orientation)
    return np.ascontiguousarray(pixels), _jpeg_facts(header)


def check_image(
    data: bytes | memoryview,
    *,
    background: tuple[int, int, int] = WHITE,
    max_pixels: int = DEFAULT_MAX_PIXELS,
) -> tuple[ImageFacts, str]:
    """Decode completely, and keep the facts and the perceptual hash only.

    The fastest way to know that a file is whole: of an ordinary JPEG every coded value is decoded, but only
    a small grey picture is put together from them.

    Raises:
        DecodeError: See decode_image_with_facts; the same files fail.
    """
    refuse_switch()
    format_name = sniff_image_format(data)
    header = _ordinary_jpeg(data, format_name, max_pixels)
    if header is None:
        pixels, facts = _decode_carefully(data, format_name, background, max_pixels)
        return facts, perceptual_hash(pixels)
    luma, facts = check_jpeg(data), _jpeg_facts(header)
    extent = scaled_extent(luma, header.height, header.width)
    if header.orientation != 1:
        # What stands for a part of a pixel may come to lie on another side; that is too little to matter.
        luma = np.ascontiguousarray(orient_pixels(luma, header.orientation))
        extent = extent[::-1] if swaps_axes(header.orientation) else extent
    return facts, perceptual_hash(luma, extent=extent)


def read_image_facts(data: bytes | memoryview, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> ImageFacts:
    """Tell the facts from the header alone. Nothing is known about the pixels then.

    Raises:
        DecodeError: Of the reasons of decode_image_with_facts those that a header tells.
    """
    format_name = sniff_image_format(data)
    header = _ordinary_jpeg(data, format_name, max_pixels)
    if header is not None:
        return _jpeg_facts(header)
    facts, is_spared = _read_header(data, format_name, max_pixels)
    return _noted(facts, "broken_metadata") if is_spared else facts


def decode_frames(
    data: bytes | memoryview,
    *,
    background: tuple[int, int, int] = WHITE,
    max_pixels: int = DEFAULT_MAX_PIXELS,
) -> Iterator[NDArray[np.uint8]]:
    """Decode every frame of an animation or page of a file, as a viewer shows them: uint8 (H, W, 3) each.

    Args:
        data: The encoded file.
        background: RGB 0..255 behind transparent pixels.
        max_pixels: Budget for all frames together.

    Raises:
        DecodeError: See decode_image_with_facts.
    """
    from datapipe.decode.careful import load_frame, open_picture

    refuse_switch()
    format_name = sniff_image_format(data)
    if format_name == "PNG":
        check_png_chunks(data)
    facts, is_spared = _read_header(data, format_name, max_pixels)
    if is_spared:
        data = pixels_alone(data, format_name)
    with open_picture(data, format_name, max_pixels) as image:
        check_pixel_budget(facts.width, facts.height, max_pixels, facts.n_frames)
        for number in range(facts.n_frames):
            yield np.array(load_frame(image, number, facts, data, format_name, background))


def _ordinary_jpeg(data: bytes | memoryview, format_name: str, max_pixels: int) -> JpegHeader | None:
    header = read_jpeg_header(data) if format_name == "JPEG" else None
    if header is not None:
        check_pixel_budget(header.width, header.height, max_pixels)
    return header


def _jpeg_facts(header: JpegHeader) -> ImageFacts:
    is_turned = swaps_axes(header.orientation)
    return ImageFacts(
        format="jpeg",
        mode=header.mode,
        had_alpha=False,
        exif_orientation=header.orientation,
        n_frames=1,
        width=header.height if is_turned else header.width,
        height=header.width if is_turned else header.height,
        notes=("broken_exif",) if header.is_exif_broken else (),
    )


def _read_header(data: bytes | memoryview, format_name: str, max_pixels: int) -> tuple[ImageFacts, bool]:
    from datapipe.decode.careful import open_picture, read_facts

    def read(data: bytes | memoryview) -> ImageFacts:
        with open_picture(data, format_name, max_pixels) as image:
            return read_facts(image, format_name)

    return read_past_metadata(read, data, format_name)


def _decode_carefully(
    data: bytes | memoryview, format_name: str, background: tuple[int, int, int], max_pixels: int
) -> tuple[NDArray[np.uint8], ImageFacts]:
    from datapipe.decode.careful import load_picture, open_picture, read_facts

    def read(data: bytes | memoryview) -> tuple[NDArray[np.uint8], ImageFacts]:
        with open_picture(data, format_name, max_pixels) as image:
            facts = read_facts(image, format_name)
            rgb, is_profile_broken = load_picture(image, facts, data, format_name, background)
        if format_name == "JPEG":
            check_jpeg(data)  # Pillow does not tell what libjpeg repaired by guess
        facts = replace(facts, width=rgb.width, height=rgb.height)
        return np.array(rgb, dtype=np.uint8), _noted(facts, "broken_profile") if is_profile_broken else facts

    if format_name == "PNG":
        check_png_chunks(data)
    (pixels, facts), is_spared = read_past_metadata(read, data, format_name)
    return pixels, _noted(facts, "broken_metadata") if is_spared else facts


def _noted(facts: ImageFacts, note: str) -> ImageFacts:
    return replace(facts, notes=(*facts.notes, note))
