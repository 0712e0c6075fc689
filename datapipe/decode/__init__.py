"""Encoded bytes to pixels and text, with a reason code for everything that cannot be used."""

from __future__ import annotations

from datapipe.decode.image import (
    DEFAULT_MAX_PIXELS,
    ImageFacts,
    check_image,
    decode_image,
    decode_image_with_facts,
)
from datapipe.decode.sniff import sniff_image_format
from datapipe.decode.text import check_text

__all__ = [
    "DEFAULT_MAX_PIXELS",
    "ImageFacts",
    "check_image",
    "check_text",
    "decode_image",
    "decode_image_with_facts",
    "sniff_image_format",
]
