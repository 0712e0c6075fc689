"""What the tags of a TIFF say about its samples, where Pillow goes by their mode alone."""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin

from datapipe.decode.exif import METADATA_ERRORS
from datapipe.errors import DecodeError

__all__ = ["describe_samples", "refuse_unusual_tiff", "tagged_grey"]

_SUBFILE_TYPE: Final = 254
_DNG_VERSION: Final = 50706
_KINDS: Final = {1: "unsigned", 2: "signed", 3: "float"}
_WHITE_IS_ZERO: Final = 0


def refuse_unusual_tiff(image: Image.Image) -> None:
    """Refuse what Pillow opens as another picture than a viewer shows.

    Raises:
        DecodeError: Reason `unsupported_format` for camera raw files, of which only the preview would be
            seen, and for signed samples of 8 bits, which would be read as unsigned.
    """
    tags = _tags_of(image)
    if _DNG_VERSION in tags or _number(tags.get(_SUBFILE_TYPE)) & 1:
        raise DecodeError(
            "unsupported_format",
            "a camera raw file, or a TIFF that begins with the preview of another picture; "
            "develop it to JPEG, PNG or an 8-bit TIFF",
        )
    if _sample_kind(tags) == "signed" and _number(tags.get(TiffImagePlugin.BITSPERSAMPLE)) == 8:
        raise DecodeError("unsupported_format", "a TIFF of signed 8-bit samples; convert it to unsigned ones")


def describe_samples(data: bytes | memoryview) -> str | None:
    """Name the layout of the first picture, such as `3 x 32-bit float samples`; None without whole tags."""
    file = io.BytesIO(data)
    try:
        head = file.read(8)
        if head[2] == 43 or head[3] == 43:
            head += file.read(8)
        directory = TiffImagePlugin.ImageFileDirectory_v2(head)
        file.seek(directory.next)
        directory.load(file)
        tags = dict(directory)
    except METADATA_ERRORS:
        return None
    needed = (TiffImagePlugin.IMAGEWIDTH, TiffImagePlugin.IMAGELENGTH, TiffImagePlugin.BITSPERSAMPLE)
    if not all(_number(tags.get(tag)) for tag in needed):
        return None
    samples = _number(tags.get(TiffImagePlugin.SAMPLESPERPIXEL, 1))
    bits = _number(tags[TiffImagePlugin.BITSPERSAMPLE])
    photometric = _number(tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION))
    return f"{samples} x {bits}-bit {_sample_kind(tags)} samples, photometric interpretation {photometric}"


def tagged_grey(
    image: Image.Image, values: NDArray[np.generic]
) -> tuple[NDArray[np.generic], float | None, bool]:
    """Read wide grey samples by the tags of their TIFF.

    Args:
        image: Of mode I, I;16 or F; a picture without TIFF tags is left as it is.
        values: (H, W), its samples as Pillow read them.

    Returns:
        The samples, the value of full scale where the tags settle it, and whether 0 stands for white.
    """
    tags = _tags_of(image)
    if not tags:
        return values, None, False
    bits = _number(tags.get(TiffImagePlugin.BITSPERSAMPLE))
    if image.mode == "I" and bits == 32 and _sample_kind(tags) == "unsigned":
        values = values.astype(np.int32).view(np.uint32)
    full_scale = float(2**bits - 1) if image.mode.startswith("I;16") and 8 < bits <= 16 else None
    is_inverted = _number(tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION, 1)) == _WHITE_IS_ZERO
    return values, full_scale, is_inverted


def _tags_of(image: Image.Image) -> dict[int, Any]:
    return dict(getattr(image, "tag_v2", {}))


def _sample_kind(tags: dict[int, Any]) -> str:
    return _KINDS.get(_number(tags.get(TiffImagePlugin.SAMPLEFORMAT, 1)), "untyped")


def _number(value: object) -> int:
    """The first number of a tag, 0 for what is none."""
    first = value[0] if isinstance(value, tuple) and value else value
    return first if isinstance(first, int) else 0
