"""The common input of the storage benchmark: arrays and bytes on disk, made once from fixed seeds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg

__all__ = ["FULL", "QUICK", "Sizes", "make_data"]

_COLOURS = ["red", "blue", "green", "brown", "white", "black", "pink", "grey"]
_THINGS = ["cat", "dog", "house", "tree", "street", "sky", "water", "road", "car", "boat", "bird", "field"]
_OTHERS = ["a", "the", "with", "under", "beside", "small", "large", "old", "new", "near", "far", "and"]
_WORDS = [*_COLOURS, *_THINGS, *_OTHERS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Rows of each data set."""

    images64: int
    images224: int
    vectors: int
    pictures: int
    shards: int
    large: int


FULL = Sizes(
    images64=20_000, images224=4_000, vectors=1_000_000, pictures=4_000, shards=1_000, large=10_000_000
)
QUICK = Sizes(images64=2_000, images224=300, vectors=20_000, pictures=300, shards=50, large=100_000)


def make_data(folder: Path, sizes: Sizes) -> None:
    """Write images64, images224, vectors (.npy), samples.parquet and pictures.bin unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    if not (folder / "pictures.npy").exists():
        np.save(folder / "images64.npy", rng.integers(0, 256, (sizes.images64, 3, 64, 64), np.uint8))
        np.save(folder / "images224.npy", rng.integers(0, 256, (sizes.images224, 3, 224, 224), np.uint8))
        _write_vectors(folder / "vectors.npy", sizes.vectors, rng)
        _write_samples(folder / "samples.parquet", sizes.vectors, rng)
        _write_pictures(folder, sizes.pictures, rng)


def _write_vectors(path: Path, rows: int, rng: np.random.Generator) -> None:
    """float16 (rows, 768); the first value of a row tells it from those like it."""
    some = rng.standard_normal((4096, 768)).astype(np.float16)
    vectors = np.lib.format.open_memmap(path, "w+", np.float16, (rows, 768))
    for start in range(0, rows, len(some)):
        part = vectors[start : start + len(some)]
        part[:] = some[: len(part)]
        part[:, 0] = start // len(some)
    vectors.flush()


def _write_samples(path: Path, rows: int, rng: np.random.Generator) -> None:
    """width: 100 to 499; caption: eight words out of 32."""
    words = np.array(_WORDS, object)[rng.integers(0, len(_WORDS), (rows, 8))]
    captions = pa.array([" ".join(line) for line in words.tolist()])
    widths = pa.array(rng.integers(100, 500, rows))
    pq.write_table(pa.table({"width": widths, "caption": captions}), path)


def _write_pictures(folder: Path, rows: int, rng: np.random.Generator) -> None:
    """JPEGs of noise of about 47 kB, one after the other, and where each ends."""
    pictures = []
    for _ in range(rows):
        small = rng.integers(0, 256, (96, 96, 3), np.uint8)
        image = np.ascontiguousarray(small.repeat(2, 0).repeat(2, 1))
        pictures.append(simplejpeg.encode_jpeg(image, quality=int(rng.integers(78, 92))))
    (folder / "pictures.bin").write_bytes(b"".join(pictures))
    np.save(folder / "pictures.npy", np.cumsum([len(picture) for picture in pictures]))
