"""What a newcomer brings: two tars of captioned pictures, a list of prompts, a folder of photos."""

from __future__ import annotations

import argparse
import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from recipes.worlds.shapes import all_captions, all_scenes, caption_of, draw_scene

NUM_IN_TAR = 60
NUM_PHOTOS = 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    make_files(parser.parse_args().directory)


def make_files(directory: Path) -> None:
    """Write photos-000.tar, photos-001.tar, prompts.txt and photos/ with one damaged file."""
    generator = np.random.default_rng(0)
    scenes = all_scenes()
    directory.mkdir(parents=True, exist_ok=True)
    for tar in range(2):
        with tarfile.open(directory / f"photos-{tar:03d}.tar", "w") as archive:
            for number in range(NUM_IN_TAR):
                scene = scenes[(tar * NUM_IN_TAR + number) * 7 % len(scenes)]
                _add(archive, f"{tar}-{number:04d}.png", _png(draw_scene(scene, generator)))
                _add(archive, f"{tar}-{number:04d}.txt", caption_of(scene).encode())
    (directory / "prompts.txt").write_text("".join(f"{caption}\n" for caption in all_captions()[::2]))
    photos = directory / "photos"
    photos.mkdir()
    for number in range(NUM_PHOTOS):
        (photos / f"{number:02d}.png").write_bytes(_png(draw_scene(scenes[number * 5], generator)))
    (photos / "broken.png").write_bytes(_png(draw_scene(scenes[3], generator))[:90])


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


if __name__ == "__main__":
    main()
