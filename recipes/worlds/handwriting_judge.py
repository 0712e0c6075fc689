"""The held-out judge of handwritten numbers: a classifier that has seen no digit of any other split."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageFilter
from scipy.ndimage import gaussian_filter
from sklearn.kernel_ridge import KernelRidge

from recipes.worlds.handwriting import DIGIT_SIDE, INK, PAPER, SIDE, DigitPools, deal_digits, draw_number
from recipes.worlds.number_words import NUMBERS, words_to_number
from unirl.errors import ShapeError
from unirl.types import Sample

__all__ = ["UNREADABLE", "DigitJudge", "number_in_caption"]

UNREADABLE = -1
"""What `DigitJudge.read` answers where it sees no number."""

_PREFIX = "a handwritten "
_NUM_DRAWINGS, _NUM_SCRIBBLES = 1600, 400
_GAMMA, _ALPHA = 0.3, 0.03
_MIN_SCORE = 0.33
"""Under this score for its best class a digit is unreadable: 1% of real pictures, over 99% of scribbles."""
_TOPS = range(4, 11)
"""Rows at which the line of writing may start; the world starts it at row 8, a drawing may not."""
_HALF = SIDE // 2
_ROWS = DIGIT_SIDE + 2


def number_in_caption(caption: str) -> int | None:
    """Read "a handwritten forty two" as 42; None for a caption of any other form."""
    if not caption.startswith(_PREFIX):
        return None
    return words_to_number(caption.removeprefix(_PREFIX))


class DigitJudge:
    """Reads the number in a 32x32 picture and compares it with the words. Never a reward.

    A kernel ridge regression onto one-hot digits, fitted in two or three seconds on distorted drawings of the
    judge's pool alone, and onto zeros for scribbles made of the same drawings. Its scores also fade to 0 away
    from everything it was fitted on, so that a scribble is unreadable rather than the digit it resembles.

    Args:
        seed: The world's seed, which deals the judge's pool.
        pools: The world's pools.
    """

    def __init__(self, seed: int, *, pools: DigitPools | None = None) -> None:
        pool = deal_digits(seed, pools or DigitPools())["judge"]
        rng = np.random.default_rng([seed, 3])
        numbers = rng.choice(np.asarray(NUMBERS), _NUM_DRAWINGS)
        drawings = np.stack([_distort(draw_number(int(number), pool, rng), rng) for number in numbers])
        digits = np.stack(np.divmod(numbers, 10), axis=1).ravel()
        scribbles = _scribble(drawings[:_NUM_SCRIBBLES], rng)
        features = np.concatenate([_digit_features(drawings), _digit_features(scribbles)])
        targets = np.concatenate([np.eye(10)[digits], np.zeros((2 * len(scribbles), 10))])
        self._model = KernelRidge(kernel="rbf", gamma=_GAMMA, alpha=_ALPHA)
        self._model.fit(features, targets)

    def read(self, images_BHWC: np.ndarray) -> np.ndarray:
        """Return the number in each picture, int64 (B,); UNREADABLE where one of its digits is none.

        Args:
            images_BHWC: uint8 (B, 32, 32, 3) RGB.

        Raises:
            ShapeError: If the pictures have another shape or dtype.
        """
        if images_BHWC.ndim != 4 or images_BHWC.shape[1:] != (SIDE, SIDE, 3) or images_BHWC.dtype != np.uint8:
            raise ShapeError(
                f"images: found {images_BHWC.dtype} {images_BHWC.shape}, wanted uint8 (B, {SIDE}, {SIDE}, 3)"
            )
        if len(images_BHWC) == 0:
            return np.zeros(0, dtype=np.int64)
        scores = self._model.predict(_digit_features(images_BHWC))
        is_clear = (scores.max(axis=1) > _MIN_SCORE).reshape(-1, 2).all(axis=1)
        tens, units = scores.argmax(axis=1).reshape(-1, 2).T
        is_number = is_clear & (tens > 0)
        return np.where(is_number, 10 * tens + units, UNREADABLE).astype(np.int64)

    def judge(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return float64 (B,): 1.0 where the caption names the number that is read in the picture.

        Both directions are measured alike: in direction "text" the real picture is read too. A malformed
        caption and an unreadable picture give 0.0.
        """
        if not samples:
            return np.zeros(0)
        numbers = self.read(np.stack([sample.image for sample in samples]))
        named = [number_in_caption(sample.caption) for sample in samples]
        return np.array([float(name == number) for name, number in zip(named, numbers, strict=True)])


def _digit_features(images_BHWC: np.ndarray) -> np.ndarray:
    """Describe the strokes of both digits of each picture; float64 (2 B, 280), tens before units.

    Eight maps of edge strength, one for each direction, blurred and thinned out to 7x5: what a digit is made
    of, hardly touched by thickness, blur or a pixel's shift.
    """
    ink = _find_line(_ink(images_BHWC))
    digits = _centre(ink.reshape(-1, _ROWS, 2, _HALF).swapaxes(1, 2).reshape(-1, _ROWS, _HALF))
    across, down = np.zeros_like(digits), np.zeros_like(digits)
    across[:, :, 1:-1] = digits[:, :, 2:] - digits[:, :, :-2]
    down[:, 1:-1] = digits[:, 2:] - digits[:, :-2]
    slopes = (across, down, (across + down) / np.sqrt(2), (across - down) / np.sqrt(2))
    edges = np.stack([np.maximum(sign * slope, 0) for slope in slopes for sign in (1, -1)], axis=1)
    maps = gaussian_filter(edges, (0, 0, 1.2, 1.2))[:, :, 1::3, 1::3]
    features: np.ndarray = maps.reshape(len(digits), -1)
    return features


def _centre(digits: np.ndarray) -> np.ndarray:
    """Move each digit of (n, H, W) so that its centre of ink is in the middle column."""
    columns = digits.sum(axis=1) + 1e-6
    middle = (columns * np.arange(_HALF)).sum(axis=1) / columns.sum(axis=1)
    return _shift_columns(digits, np.rint(middle - (_HALF - 1) / 2), limit=2)


def _ink(images_BHWC: np.ndarray) -> np.ndarray:
    """Project colours on the line from paper to ink; float64 (B, 32, 32), 0 is paper and 1 is ink."""
    colour = (INK - PAPER).astype(np.float64)
    ink: np.ndarray = np.clip((images_BHWC - PAPER) @ colour / (colour @ colour), 0, 1)
    return ink


def _find_line(ink: np.ndarray) -> np.ndarray:
    """Cut out the rows that hold most ink and centre the gap between the digits; (B, 20, 32)."""
    until = np.pad(ink.sum(axis=2).cumsum(axis=1), ((0, 0), (1, 0)))
    tops = np.array(_TOPS)
    top = tops[np.argmax(until[:, tops + DIGIT_SIDE] - until[:, tops], axis=1)]
    rows = top[:, None] - 1 + np.arange(_ROWS)
    line = np.take_along_axis(ink, rows[:, :, None], axis=1)
    gaps = [0, 1, _HALF - 1, _HALF, SIDE - 2, SIDE - 1]
    shifts = np.array([-1, 0, 1])
    in_gaps = [
        _shift_columns(line, np.full(len(line), shift), limit=1)[:, :, gaps].sum(axis=(1, 2))
        for shift in shifts
    ]
    return _shift_columns(line, shifts[np.argmin(in_gaps, axis=0)], limit=1)


def _shift_columns(pictures: np.ndarray, shifts: np.ndarray, *, limit: int) -> np.ndarray:
    """Move picture b of (B, H, W) to the left by shifts[b] columns, at most `limit`, filling with paper."""
    padded = np.pad(pictures, ((0, 0), (0, 0), (limit, limit)))
    starts = limit + np.clip(shifts, -limit, limit).astype(np.int64)
    columns = starts[:, None] + np.arange(pictures.shape[2])
    return np.take_along_axis(padded, columns[:, None, :], axis=2)


def _distort(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Slant, stretch, blur and speckle a drawing a little, as other hands and a tokenizer would."""
    matrix = np.eye(2) + rng.normal(0, 0.06, (2, 2))
    offset = (np.eye(2) - matrix) @ np.full(2, SIDE / 2)
    picture = Image.fromarray(image).transform(
        (SIDE, SIDE),
        Image.Transform.AFFINE,
        (*matrix[0], offset[0], *matrix[1], offset[1]),
        Image.Resampling.BICUBIC,
        fillcolor=(int(PAPER[0]), int(PAPER[1]), int(PAPER[2])),
    )
    if rng.random() < 0.4:
        picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.4)))
    speckle = rng.normal(0, rng.uniform(0, 20), image.shape) * (rng.random() < 0.3)
    return np.clip(np.asarray(picture) + speckle, 0, 255).astype(np.uint8)


def _scribble(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Shuffle the 4x4 patches of half of the pictures, and every place within the patches of the others."""
    patches = images.reshape(-1, 8, 4, 8, 4, 3).swapaxes(2, 3).reshape(-1, 64, 4, 4, 3)
    half = len(patches) // 2
    whole = [picture[rng.permutation(64)] for picture in patches[:half]]
    mixed = np.concatenate([np.stack(whole), rng.permuted(patches[half:], axis=1)])
    pictures: np.ndarray = mixed.reshape(-1, 8, 8, 4, 4, 3).swapaxes(2, 3).reshape(images.shape)
    return pictures
