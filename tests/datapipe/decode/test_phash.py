"""The perceptual hash: stable where a picture stays the same, far apart where it does not."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from datapipe.decode import check_image, decode_image, perceptual_hash, phash_distance


def picture(seed: int, width: int = 180, height: int = 140) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encode(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def test_a_worked_example() -> None:
    """A ramp from black to white along x has one frequency: the first of the row, with a negative sign."""
    ramp = np.broadcast_to(np.linspace(0, 255, 32).astype(np.uint8), (32, 32))
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(perceptual_hash(ramp)), np.uint8)).reshape(8, 8)
    assert bits[0, 0] == 1 and bits[0, 1] == 0
    falling = np.unpackbits(
        np.frombuffer(bytes.fromhex(perceptual_hash(np.ascontiguousarray(ramp[:, ::-1]))), np.uint8)
    ).reshape(8, 8)
    assert falling[0, 1] == 1
    assert not bits[1:].any() and not falling[1:].any()
    assert perceptual_hash(np.zeros((5, 9, 3), np.uint8)) == "0" * 16
    assert perceptual_hash(np.full((1, 1), 200, np.uint8)) == "8" + "0" * 15


def test_stable_under_resizing_and_encoding_again() -> None:
    for seed in range(12):
        source = picture(seed)
        first = perceptual_hash(np.asarray(source))
        for changed in (
            source.resize((90, 70)),
            source.resize((400, 300)),
            source.resize((64, 64)),
            Image.open(io.BytesIO(encode(source, "JPEG", quality=30))),
            Image.open(io.BytesIO(encode(source, "WEBP", quality=50))),
        ):
            assert phash_distance(first, perceptual_hash(np.asarray(changed.convert("RGB")))) <= 6


def test_other_pictures_are_far() -> None:
    hashes = [perceptual_hash(np.asarray(picture(seed))) for seed in range(20)]
    distances = [phash_distance(a, b) for i, a in enumerate(hashes) for b in hashes[:i]]
    assert min(distances) >= 10 and 24 <= np.mean(distances) <= 36


def test_the_check_of_a_file_hashes_what_is_seen() -> None:
    """The same picture in every container and orientation has about the same hash."""
    source = picture(3)
    tags = Image.Exif()
    tags[0x0112] = 6
    files = [
        encode(source, "PNG"),
        encode(source, "JPEG", quality=95),
        encode(source.convert("CMYK"), "JPEG", quality=95),
        encode(source.transpose(Image.Transpose.ROTATE_90), "JPEG", quality=95, exif=tags),
    ]
    wanted = perceptual_hash(decode_image(files[0]))
    assert [phash_distance(wanted, check_image(data)[1]) <= 6 for data in files] == [True] * 4
