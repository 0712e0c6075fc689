"""Profiles, wide integers and alpha, beside what the field cases hold."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageCms

from datapipe.decode.colour import has_alpha, to_rgb

WHITE = (255, 255, 255)


def rgb_of(image: Image.Image, background: tuple[int, int, int] = WHITE) -> np.ndarray:
    return np.asarray(to_rgb(image, background=background)[0])


def test_wide_integers_by_their_largest_value() -> None:
    for largest, scale in ((200, 255), (60_000, 65_535), (2**31 - 1, 2**32 - 1)):
        values = np.array([[0, largest // 2, largest, -5]], np.int32)
        grey = rgb_of(Image.fromarray(values))[0, :, 0]
        wanted = np.rint(np.clip(values[0], 0, None) * (255 / scale))
        np.testing.assert_array_equal(grey, wanted)


def test_floats_with_holes() -> None:
    values = np.array([[0, 0.5, 1, np.nan, np.inf, -1]], np.float32)
    assert rgb_of(Image.fromarray(values))[0, :, 0].tolist() == [0, 128, 255, 0, 0, 0]


def test_a_colour_key_in_16_bits_is_transparent() -> None:
    picture = Image.fromarray(np.array([[0, 65535, 300]], np.uint16))
    picture.info["transparency"] = 300
    assert rgb_of(picture, (9, 8, 7))[0].tolist() == [[0, 0, 0], [255, 255, 255], [9, 8, 7]]
    assert has_alpha(picture)


def test_alpha_is_mixed_with_the_ground() -> None:
    picture = Image.new("RGBA", (1, 1), (100, 0, 200, 51))
    np.testing.assert_allclose(rgb_of(picture, (0, 100, 0))[0, 0], [20, 80, 40], atol=1)


def test_a_profile_of_another_colour_space_changes_the_pixels() -> None:
    source = Image.fromarray(np.full((2, 2, 3), (200, 100, 50), np.uint8))
    xyz = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    # The same profile under another name is converted, not skipped, and changes nothing.
    renamed = xyz.replace(b"s\0R\0G\0B", b"x\0R\0G\0B").replace(b"sRGB", b"xRGB")
    source.info["icc_profile"] = renamed
    converted, is_broken = to_rgb(source, background=WHITE)
    assert not is_broken
    np.testing.assert_allclose(np.asarray(converted)[0, 0], [200, 100, 50], atol=1)


def test_a_profile_that_does_not_fit_the_mode_is_ignored_and_told() -> None:
    source = Image.new("CMYK", (2, 2), (0, 255, 255, 0))
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    source.info["icc_profile"] = profile.replace(b"s\0R\0G\0B", b"x\0R\0G\0B").replace(b"sRGB", b"xRGB")
    converted, is_broken = to_rgb(source, background=WHITE)
    assert is_broken
    np.testing.assert_array_equal(np.asarray(converted)[0, 0], [255, 0, 0])


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK"])
def test_opaque_modes_have_no_alpha(mode: str) -> None:
    assert not has_alpha(Image.new(mode, (2, 2)))
