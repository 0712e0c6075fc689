"""TIFFs whose tags say more about the samples than the mode that Pillow gives them."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from datapipe.decode import decode_image, read_image_facts
from datapipe.errors import DecodeError

GREY = np.arange(64).reshape(8, 8) * 4
WANTED = GREY[:, :, None].repeat(3, 2)
UNSIGNED, SIGNED, FLOAT = 1, 2, 3


def tiff(
    samples: np.ndarray,
    bits: int,
    *,
    kind: int = UNSIGNED,
    photometric: int = 1,
    order: str = "<",
    **more: int,
) -> bytes:
    """An uncompressed TIFF of one strip, samples (H, W, channels) of any number of bits."""
    height, width, channels = samples.shape
    if bits == 12:
        rows = [(row.ravel()[:, None] >> np.arange(12)[::-1]) & 1 for row in samples.astype(int)]
        data = b"".join(np.packbits(row.astype(np.uint8)).tobytes() for row in rows)
    else:
        data = samples.astype(f"{order}{'_uif'[kind]}{bits // 8}").tobytes()
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 277: channels, 278: height}
    tags |= {279: len(data), 339: kind} | {int(tag[1:]): value for tag, value in more.items()}
    lists = 8 + 2 + 12 * (len(tags) + 1) + 4
    tags[273] = lists + 4 * channels
    entries = b""
    for tag, value in sorted(tags.items()):
        count = channels if tag in (258, 339) else 1
        if count > 2:
            at = lists + (2 * channels if tag == 339 else 0)
            entries += struct.pack(f"{order}HHII", tag, 3, count, at)
        elif value > 65535:
            entries += struct.pack(f"{order}HHII", tag, 4, count, value)
        else:
            entries += struct.pack(f"{order}HHIHH", tag, 3, count, value, value)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, len(tags))
    behind = struct.pack(f"{order}I{2 * channels}H", 0, *[bits] * channels, *[kind] * channels)
    return head + entries + behind + data


@pytest.mark.parametrize("photometric", [0, 1])
@pytest.mark.parametrize(
    ("bits", "kind", "full"), [(8, UNSIGNED, 255), (16, UNSIGNED, 65535), (32, FLOAT, 1)]
)
def test_zero_may_stand_for_white(bits: int, kind: int, full: int, photometric: int) -> None:
    stored = GREY if photometric else 255 - GREY
    data = tiff(stored[:, :, None] * (full / 255), bits, kind=kind, photometric=photometric)
    np.testing.assert_array_equal(decode_image(data), WANTED)


def test_twelve_bits_are_stretched_by_their_own_full_scale() -> None:
    stored = np.rint(GREY * (4095 / 255)).astype(int)
    np.testing.assert_array_equal(decode_image(tiff(stored[:, :, None], 12)), WANTED)


def test_unsigned_samples_of_32_bits_keep_their_upper_half() -> None:
    np.testing.assert_array_equal(decode_image(tiff(GREY[:, :, None] * (2**24 + 2**16 + 257), 32)), WANTED)


@pytest.mark.parametrize(
    ("samples", "bits", "options", "named"),
    [
        (GREY[:, :, None] / 255, 64, {"kind": FLOAT}, "1 x 64-bit float samples"),
        (WANTED / 255, 32, {"kind": FLOAT, "photometric": 2}, "3 x 32-bit float samples"),
        (WANTED[:, :, :2] * 257, 16, {"t338": 2}, "2 x 16-bit unsigned samples"),
        (GREY[:, :, None] // 2, 8, {"kind": SIGNED}, "signed 8-bit samples"),
        (GREY[:, :, None], 8, {"t254": 1}, "preview of another picture"),
        (GREY[:, :, None], 8, {"t50706": 1}, "a camera raw file"),
    ],
)
def test_what_cannot_be_shown_rightly_is_named(
    samples: np.ndarray, bits: int, options: dict[str, int], named: str
) -> None:
    with pytest.raises(DecodeError, match=named) as caught:
        decode_image(tiff(samples, bits, **options))
    assert caught.value.reason == "unsupported_format"


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_header_tells_the_size_of_the_turned_picture(orientation: int, order: str) -> None:
    data = tiff(GREY[:4, :, None], 8, order=order, t274=orientation)
    facts, pixels = read_image_facts(data), decode_image(data)
    assert (facts.height, facts.width) == pixels.shape[:2] == ((4, 8) if orientation < 5 else (8, 4))
