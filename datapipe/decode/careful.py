"""The careful path: any format that Pillow reads, with a reason for everything that fails."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from PIL import Image, UnidentifiedImageError

from datapipe.decode.colour import has_alpha, to_rgb
from datapipe.decode.exif import METADATA_ERRORS, apply_orientation, read_orientation, swaps_axes
from datapipe.decode.facts import ImageFacts
from datapipe.decode.png_chunks import check_png_rows, exif_of_png
from datapipe.decode.refusals import check_pixel_budget
from datapipe.decode.tiff_samples import describe_samples, refuse_unusual_tiff
from datapipe.errors import DecodeError

__all__ = ["load_frame", "load_picture", "open_picture", "read_facts"]

_BIG_TIFF: Final = 43
_PNG_DEPTH_AT: Final = 24  # in the header chunk
_PIXEL_ERRORS: Final = (*METADATA_ERRORS, EOFError, MemoryError, Image.DecompressionBombError)


@contextmanager
def open_picture(data: bytes | memoryview, format_name: str, max_pixels: int) -> Iterator[Image.Image]:
    """Open by the format that was sniffed, and check the size that the header claims.

    Raises:
        DecodeError: Reasons `missing_codec`, `unsupported_format`, `too_many_pixels`, `truncated`, `corrupt`.
    """
    with _open(data, format_name) as image:
        check_pixel_budget(image.width, image.height, max_pixels)
        if format_name == "TIFF":
            refuse_unusual_tiff(image)
        if format_name == "PNG":
            _settle_png(image, data)
        yield image


def read_facts(image: Image.Image, format_name: str) -> ImageFacts:
    """Tell the facts of an opened picture, before its pixels are loaded."""
    orientation, is_exif_broken = read_orientation(image)
    # Pillow turns a TIFF while it loads, and tells the size of the turned one before.
    is_turned = swaps_axes(orientation) and format_name != "TIFF"
    return ImageFacts(
        format=format_name.lower(),
        mode=image.mode,
        had_alpha=has_alpha(image),
        exif_orientation=orientation,
        n_frames=_count_frames(image, format_name),
        width=image.height if is_turned else image.width,
        height=image.width if is_turned else image.height,
        notes=("broken_exif",) if is_exif_broken else (),
    )


def load_picture(
    image: Image.Image,
    facts: ImageFacts,
    data: bytes | memoryview,
    format_name: str,
    background: tuple[int, int, int],
) -> tuple[Image.Image, bool]:
    """Decode the pixels of the first frame: upright RGB, and whether a broken profile was ignored.

    Raises:
        DecodeError: Reasons `truncated`, `corrupt`, `too_many_pixels`, `out_of_memory`.
    """
    _load(image, data, format_name)
    rgb, is_profile_broken = _to_rgb(image, background)
    # Pillow's TIFF reader turns the pixels while it loads; every other reader leaves them.
    if format_name != "TIFF":
        rgb = apply_orientation(rgb, facts.exif_orientation)
    return rgb, is_profile_broken


def load_frame(
    image: Image.Image,
    number: int,
    facts: ImageFacts,
    data: bytes | memoryview,
    format_name: str,
    background: tuple[int, int, int],
) -> Image.Image:
    """Decode one frame or page, counted from 0: upright RGB."""
    try:
        image.seek(number)
    except _PIXEL_ERRORS as error:
        raise DecodeError("corrupt", f"{format_name}: frame {number} cannot be reached: {error}") from error
    return load_picture(image, facts, data, format_name, background)[0]


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
        reason, why = "truncated" if _is_cut(data, format_name) else "corrupt", _why_unread(error)
        samples = describe_samples(data) if (format_name, reason) == ("TIFF", "corrupt") else None
        if samples is not None:
            raise DecodeError("unsupported_format", f"a TIFF of {samples}; convert it to 8 bits") from error
        raise DecodeError(reason, f"the {format_name} header {why}") from error


def _why_unread(error: Exception) -> str:
    """What Pillow says, without what differs from run to run."""
    if isinstance(error, UnidentifiedImageError | KeyError):
        return "is incomplete or holds values that cannot be"
    return f"cannot be read: {error}"


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
    if format_name == "PNG" and image.tell() == 0 and _may_lack_rows(image):
        check_png_rows(data)


def _settle_png(image: Image.Image, data: bytes | memoryview) -> None:
    """Put right what Pillow leaves out before it has loaded the pixels, or takes by another scale."""
    exif = exif_of_png(data)
    if exif is not None:
        image.info["exif"] = b"Exif\0\0" + exif
    key, depth = image.info.get("transparency"), data[_PNG_DEPTH_AT]
    if image.mode == "L" and isinstance(key, int) and depth < 8:
        image.info["transparency"] = key * (255 // (2**depth - 1))


def _may_lack_rows(image: Image.Image) -> bool:
    """Whether the last row is black or empty, as Pillow leaves what is missing, or rows came in passes."""
    if image.info.get("interlace"):
        return True
    last = image.crop((0, image.height - 1, image.width, image.height))
    return not any(last.tobytes())


def _to_rgb(image: Image.Image, background: tuple[int, int, int]) -> tuple[Image.Image, bool]:
    try:
        return to_rgb(image, background=background)
    except _PIXEL_ERRORS as error:
        raise DecodeError("corrupt", f"mode {image.mode} cannot be converted to RGB: {error}") from error


def _is_cut(data: bytes | memoryview, format_name: str) -> bool:
    """Whether the container itself shows that its end is missing."""
    if format_name in ("JPEG", "JPEG2000"):
        return b"\xff\xd9" not in bytes(data[-4096:])
    if format_name in ("AVIF", "HEIF"):
        return _has_cut_box(data)
    if format_name == "PNG":
        return b"IEND" not in bytes(data[-4096:])
    if format_name == "WEBP":
        return len(data) < int.from_bytes(bytes(data[4:8]), "little") + 8
    if format_name == "TIFF":
        return _has_cut_directory(data)
    return len(data) < 64


def _has_cut_box(data: bytes | memoryview) -> bool:
    """Whether a top-level box of an ISO media file claims more bytes than there are."""
    offset = 0
    while offset + 8 <= len(data):
        size = int.from_bytes(bytes(data[offset : offset + 4]), "big")
        if size == 0:
            return False  # up to the end of the file
        if size == 1:
            size = int.from_bytes(bytes(data[offset + 8 : offset + 16]), "big")
        offset += max(size, 8)
    return offset != len(data)


def _has_cut_directory(data: bytes | memoryview) -> bool:
    """Whether the first directory of a TIFF, which often stands at its end, is not there to its end."""
    order: Literal["little", "big"] = "little" if data[:1] == b"I" else "big"

    def number(start: int, size: int) -> int:
        return int.from_bytes(bytes(data[start : start + size]), order)

    if number(2, 2) == _BIG_TIFF:
        start = number(8, 8)
        return start + 8 + 20 * number(start, 8) > len(data)
    start = number(4, 4)
    return start + 2 + 12 * number(start, 2) > len(data)


def _count_frames(image: Image.Image, format_name: str) -> int:
    if format_name == "ICO":
        return 1
    try:
        return int(getattr(image, "n_frames", 1))
    except METADATA_ERRORS:
        return 1
