"""The files that the ingest benchmark reads: pictures with grain and captions, and a table of prompts."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

__all__ = ["make_pictures", "make_prompts", "make_tiny_tar", "without_sidecars"]

_BATCH_ROWS = 100_000


def make_pictures(folder: Path, num: int) -> Path:
    """Write num JPEGs of 300 to 500 pixels a side, about 30 kB each, with a caption beside each."""
    done = folder / "complete"
    if done.exists():
        return folder / "photos"
    photos = folder / "photos"
    photos.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    grain = random.integers(-12, 13, (500, 500, 3))
    for index in range(num):
        height, width = (int(side) for side in random.integers(300, 501, 2))
        coarse = random.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
        soft = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        pixels = np.asarray(soft).astype(np.int16) + grain[:height, :width]
        stem = photos / f"{index:06d}"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(stem.with_suffix(".jpg"), quality=80)
        stem.with_suffix(".txt").write_text(f"picture number {index}, {width} by {height}\n")
    done.touch()
    return photos


def without_sidecars(photos: Path) -> tuple[Path, Path]:
    """The same files in two more folders: pictures alone, and pictures with their captions in one table."""
    alone, tabled = photos.with_name("alone"), photos.with_name("tabled")
    done = photos.with_name("arranged")
    if done.exists():
        return alone, tabled
    for folder in (alone, tabled):
        folder.mkdir(exist_ok=True)
        for file in photos.glob("*.jpg"):
            (folder / file.name).unlink(missing_ok=True)
            (folder / file.name).hardlink_to(file)
    with (tabled / "metadata.csv").open("w", newline="") as table:
        rows = csv.writer(table)
        rows.writerow(["file_name", "caption"])
        for file in sorted(photos.glob("*.jpg")):
            rows.writerow([file.name, file.with_suffix(".txt").read_text().strip()])
    done.touch()
    return alone, tabled


def make_tiny_tar(path: Path, num: int) -> Path:
    """Write a tar of num JPEGs of 24 pixels a side, all different, with captions."""
    import tarfile

    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    with tarfile.open(temporary, "w") as tar:
        for index in range(num):
            random = np.random.default_rng(index)
            buffer = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(buffer, "JPEG")
            for suffix, data in (("jpg", buffer.getvalue()), ("txt", f"tiny {index}".encode())):
                member = tarfile.TarInfo(f"{index:07d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    temporary.rename(path)
    return path


def make_prompts(path: Path, num: int) -> Path:
    """Write a Parquet table of num prompts with an id and a category."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    schema = pa.schema({"id": pa.int64(), "prompt": pa.string(), "category": pa.string()})
    with pq.ParquetWriter(temporary, schema) as writer:
        for start in range(0, num, _BATCH_ROWS):
            numbers = range(start, min(start + _BATCH_ROWS, num))
            columns = {
                "id": list(numbers),
                "prompt": [f"a drawing of {n % 977} boats and {n} stars" for n in numbers],
                "category": [f"c{n % 12}" for n in numbers],
            }
            writer.write_table(pa.table(columns, schema))
    temporary.rename(path)
    return path
