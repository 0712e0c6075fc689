"""The fast JPEG path beside Pillow: the same pixels, the same facts, and sharper eyes for damage."""

from __future__ import annotations

import base64
import io
import struct

import numpy as np
import pytest
from PIL import Image, ImageCms

from datapipe.decode import check_image, decode_image, decode_image_with_facts, read_image_facts
from datapipe.decode.jpeg import orient_pixels, read_jpeg_header
from datapipe.decode.resize import Resample, resize_pixels
from datapipe.errors import DecodeError

KINDS: dict[str, dict[str, object]] = {
    "4:2:0": {},
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "progressive": {"progressive": True},
    "coarse": {"quality": 20},
    "restarts": {"restart_marker_blocks": 4},
    "stored as RGB": {"keep_rgb": True},
    "optimized": {"optimize": True},
}


def picture(width: int = 123, height: int = 77, seed: int = 0, noise: int = 12) -> Image.Image:
    """Soft colours with grain, as photos have; odd sizes, so that no block fits."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8))
    soft = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray(
        (soft + random.integers(-noise, noise + 1, soft.shape)).clip(0, 255).astype(np.uint8)
    )


def encode(image: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def by_pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def mean_difference(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a.astype(int) - b.astype(int)).mean())


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_the_same_pixels_as_pillow(options: dict[str, object]) -> None:
    for size in ((123, 77), (1, 1), (8, 200), (17, 3)):
        data = encode(picture(*size), **options)
        assert read_jpeg_header(data) is not None
        assert mean_difference(decode_image(data), by_pillow(data)) <= 2
        grey = encode(picture(*size).convert("L"), **options)
        assert mean_difference(decode_image(grey), by_pillow(grey)) <= 2
        assert read_image_facts(grey).mode == "L"


@pytest.mark.parametrize("noise", [0, 12, 255])
@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"progressive": True}])
def test_shrunk_while_decoding_stays_within_two_levels(options: dict[str, object], noise: int) -> None:
    for width, height in ((700, 560), (1003, 511)):
        data = encode(picture(width, height, noise=noise), **options)
        whole = Image.fromarray(by_pillow(data))
        for size in ((64, 64), (100, 80), (30, 200), (224, 224), (1, 1)):
            wanted = whole.resize((size[1], size[0]), Image.Resampling.BILINEAR)
            levels = 2 if noise == 255 else 1.5
            assert mean_difference(decode_image(data, size=size), np.asarray(wanted)) <= levels
            sharper = whole.resize((size[1], size[0]), Image.Resampling.LANCZOS)
            found = decode_image(data, size=size, resample="lanczos")
            assert mean_difference(found, np.asarray(sharper)) <= 2


@pytest.mark.parametrize("noise", [0, 12, 255])
@pytest.mark.parametrize("quality", [30, 80, 95, 97, 100])
def test_the_faster_transform_stays_within_two_levels(quality: int, noise: int) -> None:
    data = encode(picture(400, 300, noise=noise), quality=quality)
    whole = by_pillow(data)
    for size in ((299, 399), (224, 224), (200, 50)):
        wanted = resize_pixels(whole, size)
        found = decode_image(data, size=size)
        assert mean_difference(found, wanted) <= 2
        if quality == 100:
            assert mean_difference(found, wanted) <= 0.5
    larger = decode_image(data, size=(600, 800))
    assert mean_difference(larger, resize_pixels(whole, (600, 800))) <= 0.5


@pytest.mark.parametrize("resample", ["bilinear", "bicubic", "linear"])
def test_pictures_are_decoded_into_the_memory_of_the_caller(resample: Resample) -> None:
    data = encode(picture(), quality=90)
    wanted = decode_image(data, size=(40, 33), resample=resample)
    out = np.zeros((40, 33, 3), np.uint8)
    assert decode_image(data, size=(40, 33), resample=resample, out=out) is out
    assert np.array_equal(out, wanted)


@pytest.mark.parametrize("resample", ["bilinear", "bicubic", "lanczos", "box", "nearest"])
def test_filters_are_those_of_pillow(resample: str) -> None:
    pixels = np.asarray(picture())
    for size in ((40, 33), (200, 300)):
        wanted = Image.fromarray(pixels).resize((size[1], size[0]), Image.Resampling[resample.upper()])
        found = resize_pixels(pixels, size, resample)  # type: ignore[arg-type]
        assert np.abs(found.astype(int) - np.asarray(wanted)).max() <= 1
        assert found.flags.c_contiguous
    assert resize_pixels(pixels, (77, 123)) is pixels


def test_plain_linear_samples_and_does_not_average() -> None:
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    assert resize_pixels(stripes, (64, 8), "bilinear").std() < 20
    assert resize_pixels(stripes, (64, 8), "linear").std() == 0
    assert set(np.unique(resize_pixels(stripes, (64, 8), "nearest"))) <= {0, 255}


def test_a_turned_picture_is_shrunk_by_its_stored_sides() -> None:
    tags = Image.Exif()
    tags[0x0112] = 6
    source = picture(600, 200)
    data = encode(source, exif=tags, quality=95)
    found = decode_image(data, size=(60, 20))
    wanted = source.transpose(Image.Transpose.ROTATE_270).resize((20, 60), Image.Resampling.BILINEAR)
    assert mean_difference(found, np.asarray(wanted)) <= 3
    assert found.flags.writeable and found.flags.c_contiguous


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_that_of_pillow(orientation: int) -> None:
    from datapipe.decode.exif import apply_orientation

    pixels = np.asarray(picture(9, 5))
    wanted = np.asarray(apply_orientation(Image.fromarray(pixels), orientation))
    np.testing.assert_array_equal(orient_pixels(pixels, orientation), wanted)


def insert(jpeg: bytes, marker: int, payload: bytes) -> bytes:
    return jpeg[:2] + bytes((0xFF, marker)) + struct.pack(">H", len(payload) + 2) + payload + jpeg[2:]


def test_what_is_not_ordinary_is_left_to_pillow() -> None:
    jpeg = encode(picture())
    tags = Image.Exif()
    tags[0x0112] = 3
    xmp = b"http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation='6'/>"
    odd = {
        "cmyk": encode(picture().convert("CMYK")),
        "two exif blocks": insert(insert(jpeg, 0xE1, tags.tobytes()), 0xE1, tags.tobytes()),
        "orientation in xmp": insert(jpeg, 0xE1, xmp),
        "a profile": insert(jpeg, 0xE2, b"ICC_PROFILE\0\1\1 of a scanner"),
        "several pictures": insert(jpeg, 0xE2, b"MPF\0II*\0"),
        "cut header": jpeg[:60],
        "frame without content": b"\xff\xd8\xff\xc0\x00\x02",
        "no frame": jpeg[:2] + jpeg[jpeg.index(b"\xff\xda") :],
        "junk between segments": jpeg[:2] + b"\0" + jpeg[2:],
    }
    assert {name: read_jpeg_header(data) for name, data in odd.items()} == dict.fromkeys(odd)
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert read_jpeg_header(encode(picture(), icc_profile=srgb)) is not None
    assert read_jpeg_header(b"\xff\xd8\xff\xff\xff" + jpeg[3:]) is not None  # fill bytes are allowed


def with_frame(jpeg: bytes, marker: int, precision: int) -> bytes:
    at = jpeg.index(b"\xff\xc0")
    return jpeg[: at + 1] + bytes([marker]) + jpeg[at + 2 : at + 4] + bytes([precision]) + jpeg[at + 5 :]


@pytest.mark.parametrize(
    ("marker", "precision", "what"),
    [
        (0xC1, 12, "a 12-bit JPEG"),
        (0xC3, 8, "a lossless JPEG"),
        (0xC3, 16, "a lossless JPEG"),
        (0xC5, 8, "hierarc"),
    ],
)
def test_other_processes_are_refused_by_name(marker: int, precision: int, what: str) -> None:
    with pytest.raises(DecodeError, match=what) as caught:
        decode_image(with_frame(encode(picture()), marker, precision))
    assert caught.value.reason == "unsupported_format"


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_damage_in_the_middle_is_refused(options: dict[str, object]) -> None:
    jpeg = encode(picture(200, 150), **options)
    middle = len(jpeg) // 2
    for damaged in (
        jpeg[:middle] + jpeg[middle + 300 :],
        jpeg[:middle] + b"\xff\xd9" + jpeg[middle:],
        jpeg[:middle] + jpeg[middle - 200 :],
    ):
        Image.open(io.BytesIO(damaged)).load()  # what Pillow makes of it, without a word
        for judge in (decode_image, check_image, decode_image_with_facts):
            with pytest.raises(DecodeError) as caught:
                judge(damaged)
            assert caught.value.reason in {"corrupt", "truncated"}


def test_the_quick_check_refuses_what_the_full_decode_refuses() -> None:
    random = np.random.default_rng(0)
    verdicts = []
    for options in ({}, {"progressive": True}, {"subsampling": 0}):
        jpeg = encode(picture(), **options)
        start = jpeg.index(b"\xff\xda") + 14
        for _ in range(60):
            damaged = bytearray(jpeg)
            damaged[random.integers(start, len(jpeg) - 2)] ^= int(random.integers(1, 256))
            verdicts.append(tuple(_reason(judge, bytes(damaged)) for judge in (check_image, decode_image)))
    assert all(quick == full for quick, full in verdicts)
    assert sum(full != "whole" for _, full in verdicts) > 20


def _reason(judge: object, data: bytes) -> str:
    try:
        judge(data)  # type: ignore[operator]
    except DecodeError as error:
        return error.reason
    return "whole"


def test_damage_in_a_cmyk_jpeg_is_refused_too() -> None:
    jpeg = encode(picture(200, 150).convert("CMYK"))
    middle = len(jpeg) // 2
    with pytest.raises(DecodeError):
        decode_image(jpeg[:middle] + bytes(200) + jpeg[middle + 200 :])


def test_bytes_behind_the_end_are_no_damage() -> None:
    jpeg = encode(picture())
    np.testing.assert_array_equal(decode_image(jpeg + b"\0" * 999), decode_image(jpeg))


# The gradient of test_arithmetic_coding at quality 90, coded again without loss by `jpegtran -arithmetic`,
# since Pillow does not write this coding.
ARITHMETIC = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAMCAgMCAgMDAwMEAwMEBQgFBQQEBQoHBwYIDAoMDAsKCwsNDhIQDQ4RDgsLEBYQERMU"
    "FRUVDA8XGBYUGBIUFRT/2wBDAQMEBAUEBQkFBQkUDQsNFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQU"
    "FBQUFBQUFBT/yQARCAA8AFADASIAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/AO0iX47qzh9K4ydFwXVB9po/xheA"
    "RzxjWY1Q8/8A5P5CASp/nI8Z1i8l7ErWxIE0ayI7r8z2uWV30njWunLVynHdEaYYKY6MXFFTWuTY3Rw2MSKUMZQ6vQ7pV8HZWQlh"
    "k1FPAL7D/ojoyzvo6u1GKU3oHH4Z45kZJxp8+rgoAzNMeBkB95iWGWlZtq+vqten+nf1MFS6cIJDh9TcOU7F1vAUKUvs/o2PdRCt"
    "2PLmxTMVOX82BO6Gz0OnrVuV/wCiXAmQ0IkdfAzQaOKY7/cQibPeQI6a6PRiAOKHLf1w7aG8L3mDBTBHXywBksqe2HmD4udZoGtt"
    "b3+5w/8ALf799T+qRGAxZAysM6677iKg5nfpzt+ok1gUq8Yoi1l8/C9ZDenEYChJdIeN98hi2gqJ/nh/TxIFsRB2g5Cuo2pUqLfx"
    "vrfKG+zxSID/2Q=="
)


def test_arithmetic_coding() -> None:
    y, x = np.mgrid[:60, :80]
    source = np.dstack([x * 3, y * 4, x + y]).astype(np.uint8)
    assert b"\xff\xc9" in ARITHMETIC and b"\xff\xc0" not in ARITHMETIC
    pixels, facts = decode_image_with_facts(ARITHMETIC)
    np.testing.assert_array_equal(pixels, decode_image(encode(Image.fromarray(source), quality=90)))
    assert facts == check_image(ARITHMETIC)[0] == read_image_facts(ARITHMETIC)
    for length in range(4, len(ARITHMETIC), 10):
        with pytest.raises(DecodeError):
            check_image(ARITHMETIC[:length])


@pytest.mark.parametrize("resample", ["bilinear", "bicubic", "lanczos", "box", "linear", "nearest"])
def test_pixels_stay_while_other_pictures_are_decoded(resample: Resample) -> None:
    pictures = [encode(picture(140, 120, seed)) for seed in range(3)]
    for size in ((64, 64), (120, 140), (120, 70)):
        held = [decode_image(data, size=size, resample=resample) for data in pictures]
        copies = [pixels.copy() for pixels in held]
        for data, pixels, copy in zip(pictures, held, copies):
            wanted = resize_pixels(decode_image(data), size, resample)
            assert mean_difference(copy, wanted) <= 1.5
            np.testing.assert_array_equal(copy, decode_image(data, size=size, resample=resample))
            np.testing.assert_array_equal(pixels, copy)
