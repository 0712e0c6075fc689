"""The exact judge of the shapes world: reads a scene off the pixels by rules. Nothing is fitted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import get_args

import numpy as np
from scipy.ndimage import binary_dilation, label

from recipes.worlds.shapes import (
    CENTRE,
    COLOURS,
    EXTENT,
    JITTER,
    PAPER,
    SIDE,
    Colour,
    Place,
    Scene,
    Shape,
    Size,
    Thing,
    caption_of,
    scene_in_caption,
    shape_mask,
)
from unirl.errors import ShapeError
from unirl.types import Sample

__all__ = ["SceneJudge"]

_MIN_PIXELS = 8
"""Smaller specks of colour are blur; the smallest thing has more than 30 pixels."""
_MIN_OVERLAP = 0.7
"""Least likeness to the best template: a.b / (a.a + b.b - a.b), for masks intersection over union."""


class SceneJudge:
    """Reads the scene in a 32x32 picture and compares it with the words. Never a reward.

    Each pixel is taken as paper under so much of one colour; connected pixels of a colour are a thing; the
    template (size, shape and place, anywhere within a pixel more than the jitter) that shares most with it
    says what it is. Too little shared, more than two things, or places that do not go together: no scene.
    """

    def read(self, image_HWC: np.ndarray) -> Scene | None:
        """Return the scene in a uint8 (32, 32, 3) picture, or None where there is none.

        Raises:
            ShapeError: If the picture has another shape or dtype.
        """
        if image_HWC.shape != (SIDE, SIDE, 3) or image_HWC.dtype != np.uint8:
            raise ShapeError(
                f"image: found {image_HWC.dtype} {image_HWC.shape}, wanted uint8 ({SIDE}, {SIDE}, 3)"
            )
        things = []
        for colour, coverage in _coverage(image_HWC).items():
            is_covered = coverage > 0.5
            if is_covered.sum() < _MIN_PIXELS:
                continue
            parts, num_parts = label(is_covered)
            for part in (parts == number for number in range(1, num_parts + 1)):
                if part.sum() >= _MIN_PIXELS:
                    things.append(_recognize(coverage * binary_dilation(part), colour))
        return _as_scene(things)

    def judge(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return float64 (B,): 1.0 where picture and caption show the same scene, whichever was written.

        A malformed caption and a picture that is no scene give 0.0.
        """
        verdicts = []
        for sample in samples:
            named = scene_in_caption(sample.caption)
            verdicts.append(float(named is not None and named == self.read(sample.image)))
        return np.array(verdicts, dtype=np.float64)


def _coverage(image_HWC: np.ndarray) -> dict[Colour, np.ndarray]:
    """Say how much of each pixel each colour covers, float64 (H, W) in [0, 1] each.

    A pixel is taken as a mixture of paper and the one colour that explains it best. A plain nearest colour
    would take the soft edge of red on paper for yellow.
    """
    paper = np.array(PAPER, dtype=np.float64)
    colours = np.array(list(COLOURS.values())) - paper
    pixels = image_HWC - paper
    amounts = np.clip(pixels @ colours.T / (colours * colours).sum(axis=1), 0, 1)
    unexplained = np.linalg.norm(pixels[:, :, None] - amounts[:, :, :, None] * colours, axis=-1)
    best = unexplained.argmin(axis=2)
    return {name: amounts[:, :, place] * (best == place) for place, name in enumerate(COLOURS)}


@lru_cache(maxsize=1)
def _templates() -> tuple[list[tuple[Size, Shape, Place]], np.ndarray, np.ndarray]:
    """Every shape wherever it may stand, with a pixel's tolerance.

    Returns:
        Names, coverage float32 (n, 32 * 32) and its squared length float32 (n,).
    """
    reach = range(-JITTER - 1, JITTER + 2)
    names: list[tuple[Size, Shape, Place]] = []
    masks = []
    kinds = itertools.product(get_args(Size), get_args(Shape), CENTRE.items(), reach, reach)
    for size, shape, (place, (column, row)), right, down in kinds:
        names.append((size, shape, place))
        masks.append(shape_mask(shape, EXTENT[size], column + right, row + down))
    stacked = np.stack(masks).reshape(len(masks), -1).astype(np.float32)
    return names, stacked, np.square(stacked).sum(axis=1)


def _recognize(coverage: np.ndarray, colour: Colour) -> Thing | None:
    """Name the thing that covers pixels as given, (32, 32) in [0, 1]; None if it fits no template."""
    names, masks, lengths = _templates()
    seen = coverage.ravel().astype(np.float32)
    shared = masks @ seen
    overlap = shared / (lengths + seen @ seen - shared)
    best = int(overlap.argmax())
    if overlap[best] < _MIN_OVERLAP:
        return None
    size, shape, place = names[best]
    return Thing(size, colour, shape, place)


def _as_scene(things: Sequence[Thing | None]) -> Scene | None:
    """Put things in the order of a caption; None if one is unknown or they do not make a scene."""
    order = list(CENTRE)
    known = sorted(
        (thing for thing in things if thing is not None), key=lambda thing: order.index(thing.place)
    )
    if len(known) != len(things):
        return None
    return scene_in_caption(caption_of(tuple(known)))
