"""Writes a toy world as ordinary files: a PNG folder, a JPEG folder and a WebDataset tar.

    DIRECTORY/
      sft/   pictures 00000.png ... and metadata.csv
      rl/    pictures 00000.jpg ... (quality 95) and metadata.jsonl
      eval.tar   WebDataset: 00000.png, 00000.txt (caption), 00000.json (split, held_out, ...)
      world.json   the parameters that the files were made with

Three containers on purpose: what a recipe ingests afterwards is what people bring.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from unirl.errors import ConfigError

__all__ = ["Picture", "WorldFiles", "make_world", "world_files", "write_world"]

_PARAMETERS = "world.json"
_logger = logging.getLogger("unirl.recipes.worlds")

Json = bool | int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture of a world with its caption."""

    image: np.ndarray
    """uint8 (H, W, 3) RGB."""
    caption: str
    held_out: bool
    """True if nothing with this caption is ever trained on."""
    facts: Mapping[str, Json] = field(default_factory=dict)
    """Further metadata columns, for example {"number": 42}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldFiles:
    """Where a world lies, and what is held out of its training splits."""

    directory: Path
    sft: Path
    """Folder of PNG files with metadata.csv."""
    rl: Path
    """Folder of JPEG files with metadata.jsonl."""
    eval: Path
    """WebDataset tar."""
    held_out: tuple[str, ...]
    """Captions that occur in `eval` only."""


def world_files(directory: str | Path, *, held_out: Sequence[str]) -> WorldFiles:
    """Name the files of the world in `directory`."""
    root = Path(directory)
    return WorldFiles(
        directory=root, sft=root / "sft", rl=root / "rl", eval=root / "eval.tar", held_out=tuple(held_out)
    )


def write_world(
    directory: str | Path,
    splits: Mapping[str, Iterable[Picture]],
    *,
    parameters: Mapping[str, object],
    held_out: Sequence[str],
) -> WorldFiles:
    """Write the splits "sft", "rl" and "eval" under `directory`, all or nothing.

    The pictures are taken from `splits` only if the files have to be made: a directory that holds a world of
    the same `parameters` is left as it is.

    Args:
        directory: Made in one rename, so that a kill never leaves half a world behind.
        splits: Pictures of each split, in order.
        parameters: Everything that the pictures depend on, as JSON values.
        held_out: Captions that must not occur in "sft" and "rl".

    Raises:
        ConfigError: If `directory` holds something else, or a training split shows what is held out.
    """
    root = Path(directory)
    make_world(root, lambda out: _write_splits(out, splits, frozenset(held_out)), parameters=parameters)
    return world_files(root, held_out=held_out)


def make_world(root: Path, write: Callable[[Path], None], *, parameters: Mapping[str, object]) -> None:
    """Let a function fill a new directory, all or nothing; leave one that holds the same world as it is.

    Args:
        root: Made in one rename, so that a kill never leaves half a world behind.
        write: Writes the files into the directory that it is given.
        parameters: Everything that the files depend on, as JSON values.

    Raises:
        ConfigError: If `root` holds something else.
    """
    wanted = json.loads(json.dumps({"format": 1, **parameters}))
    if root.exists():
        _check_same_world(root, wanted)
        return
    root.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    try:
        write(scratch)
        (scratch / _PARAMETERS).write_text(json.dumps(wanted, indent=1) + "\n")
        scratch.chmod(0o755)
        scratch.replace(root)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _logger.info("wrote the world %s", root)


def _check_same_world(root: Path, wanted: Mapping[str, object]) -> None:
    try:
        found = json.loads((root / _PARAMETERS).read_text())
    except FileNotFoundError:
        raise ConfigError(f"{root}: exists and holds no {_PARAMETERS}; choose another directory") from None
    if found != wanted:
        names = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        differences = ", ".join(f"{name} is {found.get(name)}, wanted {wanted.get(name)}" for name in names)
        raise ConfigError(
            f"{root}: holds another world ({differences}); delete it or choose another directory"
        )


def _write_splits(root: Path, splits: Mapping[str, Iterable[Picture]], held_out: frozenset[str]) -> None:
    _write_png_folder(root / "sft", _checked(splits["sft"], "sft", held_out))
    _write_jpeg_folder(root / "rl", _checked(splits["rl"], "rl", held_out))
    _write_tar(root / "eval.tar", splits["eval"])


def _checked(pictures: Iterable[Picture], split: str, held_out: frozenset[str]) -> Iterable[Picture]:
    for picture in pictures:
        if picture.held_out or picture.caption in held_out:
            raise ConfigError(f"split {split}: {picture.caption!r} is held out of training")
        yield picture


def _row(picture: Picture, split: str) -> dict[str, Json]:
    return {"caption": picture.caption, "split": split, "held_out": picture.held_out, **picture.facts}


def _write_png_folder(folder: Path, pictures: Iterable[Picture]) -> None:
    """CSV knows text only, so the columns that are no text in the other two containers are left out."""
    folder.mkdir()
    with (folder / "metadata.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("file_name", "caption", "split"))
        for position, picture in enumerate(pictures):
            name = f"{position:05d}.png"
            Image.fromarray(picture.image).save(folder / name)
            writer.writerow((name, picture.caption, "sft"))


def _write_jpeg_folder(folder: Path, pictures: Iterable[Picture]) -> None:
    folder.mkdir()
    with (folder / "metadata.jsonl").open("w", encoding="utf-8") as file:
        for position, picture in enumerate(pictures):
            name = f"{position:05d}.jpg"
            Image.fromarray(picture.image).save(folder / name, quality=95, subsampling=0)
            file.write(json.dumps({"file_name": name, **_row(picture, "rl")}) + "\n")


def _write_tar(path: Path, pictures: Iterable[Picture]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for position, picture in enumerate(pictures):
            png = io.BytesIO()
            Image.fromarray(picture.image).save(png, format="PNG")
            row = _row(picture, "eval")
            members = {
                "png": png.getvalue(),
                "txt": str(row.pop("caption")).encode(),
                "json": json.dumps(row).encode(),
            }
            for extension, data in members.items():
                member = tarfile.TarInfo(f"{position:05d}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
