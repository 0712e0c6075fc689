"""decode_image on whole, resized and damaged files."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from datapipe.decode import (
    ImageFacts,
    check_image,
    decode_frames,
    decode_image,
    decode_image_with_facts,
    perceptual_hash,
    phash_distance,
    read_image_facts,
)
from datapipe.errors import DataError, DecodeError

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def encode(format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, format, **options)
    return buffer.getvalue()


LOSSLESS = {
    "PNG": {},
    "BMP": {},
    "TIFF": {},
    "PPM": {},
    "QOI": {},
    "WEBP": {"lossless": True},
    "JPEG2000": {},
}
FILES = [
    *(encode(format, **options) for format, options in LOSSLESS.items()),
    *(encode("JPEG"), encode("JPEG", progressive=True), encode("GIF"), encode("AVIF"), encode("ICO")),
    encode("TIFF", compression="tiff_lzw"),
]


@pytest.mark.parametrize("format", LOSSLESS)
def test_lossless_formats_keep_every_pixel(format: str) -> None:
    pixels, facts = decode_image_with_facts(encode(format, **LOSSLESS[format]))
    np.testing.assert_array_equal(pixels, PIXELS)
    assert facts == ImageFacts(
        format=format.lower(),
        mode="RGB",
        had_alpha=False,
        exif_orientation=1,
        n_frames=1,
        width=30,
        height=20,
        notes=(),
    )


def test_checking_tells_the_same_facts() -> None:
    for data in FILES:
        pixels, facts = decode_image_with_facts(data)
        checked, phash = check_image(data)
        assert checked == read_image_facts(data) == facts
        assert phash_distance(phash, perceptual_hash(pixels)) <= 8
    with pytest.raises(DecodeError, match="the budget is 599"):
        check_image(FILES[0], max_pixels=599)


def test_a_view_on_memory_is_enough() -> None:
    np.testing.assert_array_equal(decode_image(memoryview(encode("PNG"))), PIXELS)


def test_size_is_height_and_width() -> None:
    data = encode("PNG")
    np.testing.assert_array_equal(decode_image(data, size=(20, 30)), PIXELS)
    small = decode_image(data, size=(10, 6))
    assert small.shape == (10, 6, 3) and small.flags.writeable
    wanted = Image.fromarray(PIXELS).resize((6, 10), Image.Resampling.BILINEAR)
    assert np.abs(small.astype(int) - np.asarray(wanted)).max() <= 1


def test_shrinking_keeps_the_mean() -> None:
    assert abs(decode_image(encode("PNG"), size=(2, 2)).mean() - PIXELS.mean()) < 3


@pytest.mark.parametrize("cut", range(0, 60, 3))
def test_every_cut_of_a_png_is_refused(cut: int) -> None:
    data = encode("PNG")
    with pytest.raises(DecodeError) as caught:
        decode_image(data[: len(data) * cut // 60])
    assert caught.value.reason in {"empty", "not_an_image", "truncated"}


def test_a_flipped_bit_in_a_png_is_refused() -> None:
    data = bytearray(encode("PNG"))
    data[len(data) // 2] ^= 1
    with pytest.raises(DecodeError, match="PNG chunk IDAT at byte 33 has a wrong checksum") as caught:
        decode_image(bytes(data))
    assert caught.value.reason == "corrupt"


@given(
    data=st.sampled_from(FILES),
    changes=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=8),
    keep=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
)
@settings(max_examples=150, deadline=None)
def test_damaged_files_give_pixels_or_a_reason(
    data: bytes, changes: list[tuple[float, int]], keep: float
) -> None:
    damaged = bytearray(data[: int(len(data) * keep)])
    for place, value in changes:
        # Half of the damage goes to the head, where sizes and types stand.
        limit = min(64, len(damaged)) if value % 2 else len(damaged)
        damaged[int(place * limit)] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pixels, facts = decode_image_with_facts(bytes(damaged), max_pixels=10**6)
        except DecodeError as error:
            assert error.reason and error.detail
        else:
            assert pixels.shape == (facts.height, facts.width, 3)


@given(data=st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_a_reason(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_image(data)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_all_frames_come_as_a_viewer_shows_them(format: str) -> None:
    colours = ("red", "lime", "blue")
    frames = [Image.new("RGB", (10, 6), colour) for colour in colours]
    buffer = io.BytesIO()
    options = {"lossless": True} if format == "WEBP" else {}
    frames[0].save(buffer, format, save_all=True, append_images=frames[1:], **options)
    found = list(decode_frames(buffer.getvalue()))
    assert [frame.shape for frame in found] == [(6, 10, 3)] * 3
    for frame, wanted in zip(found, frames):
        np.testing.assert_array_equal(frame, np.asarray(wanted))
    with pytest.raises(DecodeError, match="10x6 in 3 frames = 180 pixels"):
        list(decode_frames(buffer.getvalue(), max_pixels=100))


def test_an_unknown_filter_is_told() -> None:
    with pytest.raises(DataError, match="resample is 'area', wanted one of bilinear, bicubic"):
        decode_image(encode("PNG"), size=(4, 4), resample="area")  # type: ignore[arg-type]
