"""Rewards on the numbers of a picture: brightness, entropy, edges, and how small a JPEG of it is.

They are seldom a goal in themselves. With weight 0 in an ensemble they are watched, and with a small one they
keep a policy from blank or noisy pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

import numpy as np
import simplejpeg

from unirl.errors import ConfigError
from unirl.rewards.failures import Problem
from unirl.rewards.pictures import picture_problem
from unirl.rewards.rules import Rule
from unirl.types import Sample

__all__ = ["PictureStatistic", "brightness", "edges", "entropy", "jpeg_bits"]

LUMA = np.array([0.299, 0.587, 0.114])
JPEG_QUALITY = 90


def brightness(picture: np.ndarray) -> float:
    """Mean luma of uint8 (H, W, 3), from 0 (black) to 1 (white). Source: ITU-R BT.601."""
    return float((picture @ LUMA).mean() / 255)


def entropy(picture: np.ndarray) -> float:
    """Entropy of the histogram of luma, 256 bins, in bits: 0 for one flat colour, 8 at most."""
    counts = np.bincount((picture @ LUMA).round().astype(np.int64).ravel(), minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def edges(picture: np.ndarray) -> float:
    """Mean difference of luma between neighbours, down and across, from 0 (one flat colour) to 1."""
    luma = picture @ LUMA
    differences = [np.abs(np.diff(luma, axis=axis)) for axis in (0, 1)]
    num = sum(part.size for part in differences)
    return float(sum(part.sum() for part in differences) / max(num, 1) / 255)


def jpeg_bits(picture: np.ndarray) -> float:
    """Bits per pixel of a JPEG at quality 90: small for flat pictures, large for noise."""
    encoded = simplejpeg.encode_jpeg(np.ascontiguousarray(picture), quality=JPEG_QUALITY)
    return float(8 * len(encoded) / (picture.shape[0] * picture.shape[1]))


STATISTICS: Final[Mapping[str, Callable[[np.ndarray], float]]] = {
    "brightness": brightness,
    "entropy": entropy,
    "edges": edges,
    "jpeg_bits": jpeg_bits,
}


class PictureStatistic(Rule):
    """A statistic of the picture as it is, or 1 inside a range of it and falling outside.

    Args:
        statistic: "brightness", "entropy", "edges" or "jpeg_bits".
        inside: (low, high) scores 1 inside and exp(-distance / width) outside, with width high - low.
            None scores the statistic itself.

    Raises:
        ConfigError: If low is not under high.
    """

    def __init__(
        self,
        statistic: Literal["brightness", "entropy", "edges", "jpeg_bits"],
        *,
        inside: tuple[float, float] | None = None,
        max_failed_fraction: float = 0.1,
    ) -> None:
        if inside is not None and not inside[0] < inside[1]:
            raise ConfigError(f"reward {statistic}: inside is {inside}, wanted (low, high) with low < high")
        measure = STATISTICS[statistic]

        def rule(sample: Sample) -> float | Problem:
            if (found := picture_problem(sample.image)) is not None:
                return Problem(reason="picture", text=found)
            value = measure(sample.image)
            if inside is None:
                return value
            outside = max(inside[0] - value, value - inside[1], 0.0)
            return float(np.exp(-outside / (inside[1] - inside[0])))

        super().__init__(
            statistic, rule, settings=[statistic, inside], max_failed_fraction=max_failed_fraction
        )
