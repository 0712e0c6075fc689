"""PNGs that Pillow takes for whole, and metadata that cost no pixel."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from datapipe.decode import (
    check_image,
    decode_frames,
    decode_image,
    decode_image_with_facts,
    read_image_facts,
)
from datapipe.errors import DecodeError

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def chunk(kind: bytes, data: bytes, *, checksum_off_by: int = 0) -> bytes:
    checksum = (zlib.crc32(kind + data) + checksum_off_by) & 0xFFFFFFFF
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)


def png(
    rows: list[bytes],
    *,
    size: tuple[int, int],
    depth: int = 8,
    colour_type: int = 2,
    first: bytes = b"",
    last: bytes = b"",
) -> bytes:
    """A PNG of (height, width) from filtered rows, with chunks before and behind the pixels."""
    head = struct.pack(">IIBBBBB", size[1], size[0], depth, colour_type, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(b"".join(rows)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + first + body + last + chunk(b"IEND", b"")


ROWS = [b"\0" + row.tobytes() for row in PIXELS]
# First column and row, and steps, of each pass of an interlaced PNG.
PASSES = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
WHOLE = png(ROWS, size=(20, 30))
BOMB = b"x\0\0" + zlib.compress(bytes(80 << 20))


def test_rows_that_are_not_there_are_told() -> None:
    for size in ((21, 30), (40, 30)):
        with pytest.raises(DecodeError, match="the rows of the PNG have 1820 bytes") as caught:
            decode_image(png(ROWS, size=size))
        assert caught.value.reason == "truncated"
    black = [*ROWS[:10], *[b"\0" + bytes(90)] * 10]
    np.testing.assert_array_equal(decode_image(png(black, size=(20, 30)))[10:], 0)


def test_a_black_picture_in_passes_is_whole() -> None:
    for size in ((1, 1), (2, 9), (9, 2), (16, 24)):
        passes = [
            (0, 0, 8, 8),
            (4, 0, 8, 8),
            (0, 4, 4, 8),
            (2, 0, 4, 4),
            (0, 2, 2, 4),
            (1, 0, 2, 2),
            (0, 1, 1, 2),
        ]
        counts = [(len(range(y, size[0], dy)), len(range(x, size[1], dx))) for x, y, dx, dy in passes]
        rows = [b"\0" + bytes(3 * columns) for lines, columns in counts if columns for _ in range(lines)]
        whole = bytearray(png(rows, size=size))
        whole[28] = 1  # interlaced
        whole[29:33] = struct.pack(">I", zlib.crc32(whole[12:29]))
        assert decode_image(bytes(whole)).shape == (*size, 3)
        short = bytes(whole[:33]) + chunk(b"IDAT", zlib.compress(b"".join(rows[:-1]))) + chunk(b"IEND", b"")
        with pytest.raises(DecodeError, match="truncated"):
            decode_image(short)


@pytest.mark.parametrize("broken", ["filter", "adler"])
def test_damage_of_the_pixels_is_no_broken_exif(broken: str) -> None:
    if broken == "filter":
        data = png([b"\x09" + row[1:] for row in ROWS], size=(20, 30))
    else:
        packed = zlib.compress(b"".join(ROWS))
        bad = chunk(b"IDAT", packed[:-1] + bytes([packed[-1] ^ 1]))
        data = WHOLE[:33] + bad + chunk(b"IEND", b"")
    for decode in (decode_image, decode_image_with_facts, check_image):
        with pytest.raises(DecodeError, match="corrupt"):
            decode(data)


def test_reading_the_header_decodes_nothing_and_finds_an_exif_behind_the_pixels() -> None:
    exif = Image.Exif()
    exif[0x112] = 6
    behind = png(ROWS[:5], size=(20, 30), last=chunk(b"eXIf", exif.tobytes()[6:]))
    assert read_image_facts(behind).exif_orientation == 6
    assert (read_image_facts(behind).height, read_image_facts(behind).width) == (30, 20)
    whole = png(ROWS, size=(20, 30), last=chunk(b"eXIf", exif.tobytes()[6:]))
    np.testing.assert_array_equal(decode_image(whole), np.rot90(PIXELS, -1))


@pytest.mark.parametrize(
    "spoiled",
    [
        chunk(b"tEXt", b"a\0b", checksum_off_by=1),
        chunk(b"zTXt", BOMB),
        chunk(b"iCCP", BOMB),
        b"".join(chunk(b"tEXt", b"k\0" + bytes(60_000)) for _ in range(1200)),
    ],
    ids=["checksum", "text bomb", "profile bomb", "many texts"],
)
def test_metadata_that_cannot_be_read_cost_no_pixel(spoiled: bytes) -> None:
    data = png(ROWS, size=(20, 30), first=spoiled)
    pixels, facts = decode_image_with_facts(data)
    np.testing.assert_array_equal(pixels, PIXELS)
    assert facts.notes == ("broken_metadata",)
    assert facts == check_image(data)[0] == read_image_facts(data)
    np.testing.assert_array_equal(next(decode_frames(data)), PIXELS)


def test_texts_behind_the_pixels_cost_none_either() -> None:
    pixels, facts = decode_image_with_facts(png(ROWS, size=(20, 30), last=chunk(b"zTXt", BOMB)))
    np.testing.assert_array_equal(pixels, PIXELS)
    assert facts.notes == ("broken_metadata",)


@pytest.mark.parametrize(("depth", "packed"), [(1, 0b01011010), (2, 0b00011011), (4, 0x5A)])
def test_a_colour_key_has_the_scale_of_its_depth(depth: int, packed: int) -> None:
    count = 8 // depth
    values = [packed >> (8 - depth * (place + 1)) & (2**depth - 1) for place in range(count)]
    key = chunk(b"tRNS", struct.pack(">H", values[1]))
    data = png([b"\0" + bytes([packed])], size=(1, count), depth=depth, colour_type=0, first=key)
    wanted = [255 if value == values[1] else value * 255 // (2**depth - 1) for value in values]
    assert decode_image(data)[0, :, 0].tolist() == wanted


def test_a_dark_pgm_of_16_bits_stays_dark() -> None:
    values = np.arange(12).reshape(3, 4) * 20
    data = b"P5\n4 3\n65535\n" + values.astype(">u2").tobytes()
    np.testing.assert_array_equal(decode_image(data)[:, :, 0], np.rint(values / 257))


def test_a_jpeg_with_metadata_that_cannot_be_read_keeps_its_pixels() -> None:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, "JPEG", quality=95)
    whole = buffer.getvalue()
    version = whole.index(b"JFIF\0") + 5
    lost = [struct.pack(">2sH12sBB", b"\xff\xe2", 24, b"ICC_PROFILE\0", 1, 2) + b"sRGB 1.0"]
    lost.append(struct.pack(">2sH12s", b"\xff\xe2", 14, b"ICC_PROFILE\0"))
    lost.append(struct.pack(">2sH22s", b"\xff\xed", 24, b"Photoshop 3.0\0008BIM\4\4"))
    files = [
        whole[:version] + b"\2" + whole[version + 1 :],
        *(whole[:2] + piece + whole[2:] for piece in lost),
    ]
    for number, data in enumerate(files):
        pixels, facts = decode_image_with_facts(data)
        np.testing.assert_array_equal(pixels, decode_image(whole), err_msg=str(number))
        np.testing.assert_array_equal(decode_image(data, size=(10, 15)).shape, (10, 15, 3))
        assert facts.format == "jpeg" and (facts.notes == ("broken_metadata",) or number == 3), number
        assert check_image(data)[0] == facts
