"""Encoded bytes to pixels and text, with a reason code for everything that cannot be used."""

from __future__ import annotations

from datapipe.decode.facts import ImageFacts
from datapipe.decode.image import (
    DEFAULT_MAX_PIXELS,
    check_image,
    decode_frames,
    decode_image,
    decode_image_with_facts,
    read_image_facts,
)
from datapipe.decode.phash import perceptual_hash, phash_distance
from datapipe.decode.resize import Resample, resize_pixels
from datapipe.decode.sniff import sniff_image_format
from datapipe.decode.text import check_text

__all__ = [
    "DEFAULT_MAX_PIXELS",
    "ImageFacts",
    "Resample",
    "check_image",
    "check_text",
    "decode_frames",
    "decode_image",
    "decode_image_with_facts",
    "perceptual_hash",
    "phash_distance",
    "read_image_facts",
    "resize_pixels",
    "sniff_image_format",
]
