"""A picture as text: two pixels to a character in colour, or one character for a shade of grey."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from rich.text import Text

__all__ = ["as_half_blocks", "as_letters", "fitted_size"]

SHADES: Final = " .:-=+*#%@"
"""From black to white."""
CELL_HEIGHT: Final = 2
"""Pixels that are as high as a character, where one is as wide."""


def fitted_size(height: int, width: int, *, columns: int, lines: int) -> tuple[int, int]:
    """Rows and columns of pixels, two rows to a line, that fit the terminal with the picture's own shape.

    A small picture grows by whole factors only, so that each of its pixels stays a square.
    """
    scale = min(columns / width, CELL_HEIGHT * lines / height)
    if scale >= 1:
        scale = int(scale)
    rows = max(CELL_HEIGHT, CELL_HEIGHT * round(height * scale / CELL_HEIGHT))
    return rows, max(1, round(width * scale))


def as_half_blocks(pixels: np.ndarray) -> Text:
    """Draw uint8 (2 H, W, 3) RGB as H lines of upper half blocks: the letter is the upper pixel, the ground
    the lower one."""
    from rich.style import Style
    from rich.text import Text

    drawn = Text()
    for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        for top, bottom in zip(upper, lower, strict=True):
            drawn.append("▀", Style.parse(f"rgb{_triple(top)} on rgb{_triple(bottom)}"))
        drawn.append("\n")
    return drawn


def as_letters(pixels: np.ndarray) -> str:
    """Draw uint8 (2 H, W, 3) RGB as H lines of letters, denser where it is brighter."""
    import numpy as np

    grey = pixels.astype(np.float32).mean(axis=2).reshape(len(pixels) // 2, 2, -1).mean(axis=1)
    places = (grey * len(SHADES) / 256).astype(int)
    return "\n".join("".join(SHADES[place] for place in line) for line in places)


def _triple(pixel: list[int]) -> str:
    red, green, blue = pixel
    return f"({red},{green},{blue})"
