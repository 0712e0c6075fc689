"""Many pictures on one: a contact sheet as a PNG, with a line of words under each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont

__all__ = ["SHEET_SUFFIXES", "draw_sheet", "write_sheet"]

SHEET_SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".webp")
"""Formats of a sheet."""

GAP: Final = 8
LINE_HEIGHT: Final = 14
NUM_LINES: Final = 2
LETTER: Final = 11
INK, PAPER, MISSING = (40, 40, 40), (250, 250, 250), (225, 225, 225)


def write_sheet(
    path: Path, pictures: Sequence[np.ndarray | None], captions: Sequence[str], *, columns: int, side: int
) -> None:
    """Draw a sheet and write it; the file's suffix says the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_sheet(pictures, captions, columns=columns, side=side).save(path)


def draw_sheet(
    pictures: Sequence[np.ndarray | None], captions: Sequence[str], *, columns: int, side: int
) -> Image.Image:
    """Draw pictures in rows, each scaled into a square of `side` pixels over two lines of its caption.

    Args:
        pictures: uint8 (H, W, 3) RGB each; None leaves a grey square.
        captions: One for each picture; what does not fit its two lines is cut.
    """
    columns = max(1, min(columns, len(pictures)))
    lines = -(-len(pictures) // columns)
    width, height = side + GAP, side + GAP + NUM_LINES * LINE_HEIGHT
    sheet = Image.new("RGB", (columns * width + GAP, lines * height + GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(LETTER)
    for place, (pixels, caption) in enumerate(zip(pictures, captions, strict=True)):
        left, top = GAP + (place % columns) * width, GAP + (place // columns) * height
        if pixels is None:
            draw.rectangle((left, top, left + side - 1, top + side - 1), fill=MISSING)
        else:
            tile = _fitted(Image.fromarray(pixels), side)
            sheet.paste(tile, (left + (side - tile.width) // 2, top + (side - tile.height) // 2))
        for number, line in enumerate(_folded(caption, font, side)):
            draw.text((left, top + side + 1 + number * LINE_HEIGHT), line, fill=INK, font=font)
    return sheet


def _fitted(picture: Image.Image, side: int) -> Image.Image:
    """Scale to the square; a small picture keeps its pixels as squares."""
    scale = side / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture.resize(size, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS)


def _folded(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> list[str]:
    """The first lines of a text, broken between words."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return [_cut(line, font, width) for line in lines[:NUM_LINES]]


def _cut(line: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> str:
    while line and font.getlength(line) > width:
        line = line[:-1]
    return line
