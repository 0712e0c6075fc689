"""The common input of the loader benchmark: pictures and arrays on disk, made once from fixed seeds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image

__all__ = ["FULL", "QUICK", "Sizes", "long_tailed", "make_data"]

_DIFFERENT = 512
_SIDES = (320, 352, 384)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Rows of each data set."""

    pictures: int  # a multiple of 64
    shards: int  # of four pictures
    tensors64: int
    tensors224: int
    large: int
    lengths: int


FULL = Sizes(pictures=4096, shards=1000, tensors64=16_384, tensors224=2048, large=1_000_000, lengths=50_000)
QUICK = Sizes(pictures=512, shards=50, tensors64=2048, tensors224=256, large=50_000, lengths=20_000)


def make_data(folder: Path, sizes: Sizes) -> None:
    """Write pictures and small (.bin, .npy), tensors64.npy and tensors224.npy unless they are there."""
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    if not (folder / "tensors224.npy").exists():
        some = [_picture(rng) for _ in range(min(_DIFFERENT, sizes.pictures))]
        _write_pictures(folder, [some[row % len(some)] for row in range(sizes.pictures)])
        _write_pictures(folder / "shards", [some[row % len(some)] for row in range(4 * sizes.shards)])
        np.save(folder / "tensors64.npy", rng.integers(0, 256, (sizes.tensors64, 3, 64, 64), np.uint8))
        np.save(folder / "tensors224.npy", rng.integers(0, 256, (sizes.tensors224, 3, 224, 224), np.uint8))


def long_tailed(num_rows: int) -> np.ndarray:
    """Lengths of texts: most of some hundred tokens, 1 in 100 above 2,000, none above 4,096."""
    lengths = np.random.default_rng(0).lognormal(5.5, 0.9, num_rows).astype(np.int64) + 1
    return np.minimum(lengths, 4096)


def _picture(rng: np.random.Generator) -> bytes:
    """A JPEG of about 350 pixels a side: smooth areas, and texture as photographs have."""
    height, width = rng.choice(_SIDES, 2).tolist()
    coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    fine = rng.normal(0, 5, (height, width, 1)).astype(np.int16)
    pixels = np.clip(smooth + fine, 0, 255).astype(np.uint8)
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=int(rng.integers(78, 90))))


def _write_pictures(folder: Path, pictures: list[bytes]) -> None:
    """One after the other, and where each ends."""
    (folder / "pictures.bin").write_bytes(b"".join(pictures))
    np.save(folder / "pictures.npy", np.cumsum([len(picture) for picture in pictures]))
