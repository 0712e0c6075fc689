"""Orientation tags."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageOps

from datapipe.decode.exif import apply_orientation, read_orientation, swaps_axes


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_as_pillow_does(orientation: int) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (3, 5, 3), dtype=np.uint8))
    image.getexif()[0x0112] = orientation
    wanted = ImageOps.exif_transpose(image)
    found = apply_orientation(image, orientation)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    assert swaps_axes(orientation) == (found.size != image.size)
    assert read_orientation(image) == (orientation, False)


@pytest.mark.parametrize("value", [0, 9, 99, "six", b"\6", 6.0, (6, 1)])
def test_values_out_of_range_count_as_upright_and_broken(value: object) -> None:
    image = Image.new("RGB", (2, 2))
    image.getexif()[0x0112] = value
    assert read_orientation(image) == (1, True)


def test_no_tag_is_upright() -> None:
    assert read_orientation(Image.new("RGB", (2, 2))) == (1, False)
