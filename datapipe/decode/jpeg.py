"""The fast path for ordinary JPEGs: libjpeg-turbo itself, strict about damage, with the same pixels out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from datapipe.decode.exif import METADATA_ERRORS, orientation_of
from datapipe.decode.resize import Resample, resize_pixels
from datapipe.errors import DecodeError

__all__ = [
    "JFIF",
    "JpegHeader",
    "check_jpeg",
    "decode_jpeg",
    "decode_jpeg_resized",
    "jpeg_segments",
    "orient_pixels",
    "read_jpeg_header",
    "scaled_extent",
]

JFIF: Final = b"JFIF\0"
_EXIF: Final = b"Exif\0\0"
_ICC: Final = b"ICC_PROFILE\0"
_MPF: Final = b"MPF\0"
_XMP: Final = b"http://ns.adobe.com/xap/1.0/\0"
_STANDALONE: Final = frozenset((0x01, *range(0xD0, 0xD9)))
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PLAIN_FRAMES: Final = frozenset((0xC0, 0xC1, 0xC2))  # baseline, extended and progressive, all Huffman coded
_REFUSED_FRAMES: Final = {
    0xC3: "lossless",
    0xC5: "hierarchical",
    0xC6: "hierarchical",
    0xC7: "hierarchical",
    0xCB: "lossless",
    0xCD: "hierarchical",
    0xCE: "hierarchical",
    0xCF: "hierarchical",
}
_ENOUGH_FOR_HASH: Final = 32  # shorter side, in pixels, of what the perceptual hash is made from
_SCALE_MARGIN: Final = (
    3  # DCT scaling stays within 0.5 grey levels in the mean when so much is left to shrink
)
_HEAD_BYTES: Final = 8192
_SCRATCH_BYTES: Final = 6 << 20


class _Scratch(threading.local):
    """Memory of one thread for pixels that are resized at once. Fresh memory costs a tenth of a decode."""

    def __init__(self) -> None:
        self.pixels = np.empty(_SCRATCH_BYTES, np.uint8)


_scratch: Final = _Scratch()


@dataclass(frozen=True, kw_only=True, slots=True)
class JpegHeader:
    """What stands before the first scan."""

    width: int  # pixels as stored
    height: int
    mode: str  # Pillow's name: "L" or "RGB"
    orientation: int  # 1..8
    is_exif_broken: bool
    is_finely_quantized: bool = False  # quality 98 or more in libjpeg's words


def read_jpeg_header(data: bytes | memoryview) -> JpegHeader | None:
    """Read the header of an ordinary JPEG: 8 bits, grey or colour, without a profile that changes colours.

    Returns:
        None for everything that Pillow has to decide: CMYK, several pictures in one file, embedded profiles,
        arithmetic coding, orientation in XMP, unknown versions, and headers that are cut or broken.

    Raises:
        DecodeError: Reason `unsupported_format` for lossless and hierarchical JPEGs, and for more or fewer
            than 8 bits a sample, naming what it is.
    """
    head = bytes(data[:_HEAD_BYTES])  # whose bytes cost less to look at than those of a view
    offset, orientation, is_exif_broken, has_exif, has_profile, is_fine = 2, 1, False, False, False, False
    frame: tuple[int, int, int] | None = None
    while offset + 4 <= len(data):
        if offset + 4 > len(head):
            head = bytes(data)
        if head[offset] != 0xFF:
            return None
        marker = head[offset + 1]
        if marker == 0xFF:
            offset += 1
            continue
        if marker in _STANDALONE:
            offset += 2
            continue
        if marker == 0xDA:
            break
        length = (head[offset + 2] << 8) | head[offset + 3]
        start, end = offset + 4, offset + 2 + length
        if length < 2 or end > len(data):
            return None
        if end > len(head):
            head = bytes(data)
        if marker in _FRAMES:
            if length < 8:
                return None
            _refuse_frame(marker, head[start])
            if marker not in _PLAIN_FRAMES:
                return None
            size = head[start + 1 : start + 6]
            frame = (int.from_bytes(size[:2], "big"), int.from_bytes(size[2:4], "big"), size[4])
        elif marker == 0xDB:
            is_fine |= _has_fine_table(head[start:end])
        elif marker == 0xE1:
            payload = head[start:end]
            if payload.startswith(_EXIF):
                if has_exif:
                    return None
                has_exif = True
                orientation, is_exif_broken = _orientation(payload)
            elif payload.startswith(_XMP) and b"rientation" in payload:
                return None
        elif marker == 0xE0 and head.startswith(JFIF, start) and head[start + len(JFIF)] != 1:
            return None  # libjpeg warns of another version, as it does of damage
        elif marker == 0xE2:
            if has_profile or not _is_harmless_app2(head[start:end]):
                return None
            has_profile = head.startswith(_ICC, start)
        offset = end
    if frame is None or offset + 4 > len(data) or 0 in frame[:2] or frame[2] not in (1, 3):
        return None
    height, width, num_components = frame
    mode = "L" if num_components == 1 else "RGB"
    return JpegHeader(
        width=width,
        height=height,
        mode=mode,
        orientation=orientation,
        is_exif_broken=is_exif_broken,
        is_finely_quantized=is_fine,
    )


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, first byte and end of each whole segment before the first scan, whatever is in it."""
    offset = 2
    while offset + 4 <= len(data) and data[offset] == 0xFF and data[offset + 1] != 0xDA:
        start, marker = offset, data[offset + 1]
        if marker == 0xFF:
            offset += 1
            continue
        offset += 2 if marker in _STANDALONE else 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
        if offset > len(data):
            return
        yield marker, start, offset


def decode_jpeg(data: bytes | memoryview) -> NDArray[np.uint8]:
    """Decode an ordinary JPEG to RGB as stored, before any rotation.

    Returns:
        uint8 (H, W, 3).

    Raises:
        DecodeError: Reasons `truncated` and `corrupt`, also for damage that libjpeg would repair by guess.
    """
    pixels: NDArray[np.uint8] = _strictly(data, "RGB")
    return pixels


def decode_jpeg_resized(
    data: bytes | memoryview,
    header: JpegHeader,
    size: tuple[int, int],
    resample: Resample,
    *,
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """Decode an ordinary JPEG to RGB as stored, and resize it.

    A picture that is much larger than size is shrunk while it is decoded, as long as three times the size is
    left for the filter. One that shrinks at all is decoded by libjpeg's faster transform, unless its quality
    is so high that this shows. Either changes the result by about one grey level in the mean, two at most.

    Args:
        data: The whole file.
        header: From read_jpeg_header.
        size: (height, width) wanted, of the picture as stored.
        resample: See resize_pixels.
        out: See resize_pixels.

    Raises:
        DecodeError: See decode_jpeg.
    """
    if size == (header.height, header.width):
        return decode_jpeg(data)
    fits = header.height * header.width * 3 <= _SCRATCH_BYTES
    buffer = _scratch.pixels if fits else None
    if resample in ("linear", "nearest"):
        return resize_pixels(_strictly(data, "RGB", buffer=buffer), size, resample, out=out)
    least = (size[0] * _SCALE_MARGIN, size[1] * _SCALE_MARGIN)
    shrinks = size[0] <= header.height and size[1] <= header.width
    fast = shrinks and not header.is_finely_quantized
    pixels = _strictly(data, "RGB", least, min_factor=2, buffer=buffer, fast_transform=fast)
    extent = scaled_extent(pixels, header.height, header.width)
    return resize_pixels(pixels, size, resample, extent=extent, out=out)


def check_jpeg(data: bytes | memoryview) -> NDArray[np.uint8]:
    """Decode every coded value of all components, and put together a small grey picture of them.

    What makes a file fail is found while its values are decoded; what is saved is the arithmetic behind that.

    Returns:
        uint8 (h, w), the luma of the picture as stored, shrunk up to eightfold. Its last row and column may
        stand for a part of a pixel, see scaled_extent.

    Raises:
        DecodeError: See decode_jpeg.
    """
    grey = _strictly(data, "GRAY", (_ENOUGH_FOR_HASH, _ENOUGH_FOR_HASH), min_factor=2)
    return grey[:, :, 0]


def scaled_extent(pixels: NDArray[np.uint8], height: int, width: int) -> tuple[float, float]:
    """(height, width) of what a picture became that was shrunk while it was decoded, before rounding up."""
    eighths = round(8 * max(pixels.shape[:2]) / max(height, width))
    return height * eighths / 8, width * eighths / 8


def orient_pixels(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Turn and mirror stored pixels (H, W, ...) so that the picture stands upright; a view."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _strictly(
    data: bytes | memoryview,
    colours: str,
    least: tuple[int, int] = (0, 0),
    *,
    min_factor: int = 1,
    buffer: NDArray[np.uint8] | None = None,
    fast_transform: bool = False,
) -> NDArray[np.uint8]:
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
            data,
            colours,
            fastdct=fast_transform,
            min_height=least[0],
            min_width=least[1],
            min_factor=min_factor,
            buffer=buffer,
            strict=True,
        )
        return pixels
    except ValueError as error:
        reason = "truncated" if "Premature end of JPEG file" in str(error) else "corrupt"
        raise DecodeError(reason, f"JPEG of {len(data)} bytes: {error}") from error
    except MemoryError as error:
        raise DecodeError("out_of_memory", f"JPEG of {len(data)} bytes: {error}") from error


def _has_fine_table(payload: bytes) -> bool:
    """Whether one of the quantization tables of a DQT segment has the step 1 for the mean of a block."""
    at = 0
    while at < len(payload):
        num_bytes = 2 if payload[at] >> 4 else 1
        if int.from_bytes(payload[at + 1 : at + 1 + num_bytes], "big") <= 1:
            return True
        at += 1 + 64 * num_bytes
    return False


def _refuse_frame(marker: int, precision: int) -> None:
    kind = _REFUSED_FRAMES.get(marker)
    if kind is None and precision != 8:
        kind = f"{precision}-bit"
    if kind is not None:
        raise DecodeError("unsupported_format", f"a {kind} JPEG; convert it to an 8-bit JPEG or to PNG")


def _is_harmless_app2(payload: bytes) -> bool:
    if payload.startswith(_MPF):
        return False
    if not payload.startswith(_ICC):
        return True
    is_whole = payload[len(_ICC) : len(_ICC) + 2] == b"\1\1"  # the first of one piece
    return is_whole and _names_srgb(payload)


def _names_srgb(payload: bytes) -> bool:
    head = payload[: len(_ICC) + 2 + 1024]
    return b"sRGB" in head or "sRGB".encode("utf-16-be") in head


def _orientation(payload: bytes) -> tuple[int, bool]:
    from PIL.Image import Exif

    tags = Exif()
    try:
        tags.load(payload)
        return orientation_of(tags)
    except METADATA_ERRORS:
        return 1, True
