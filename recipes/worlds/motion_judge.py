"""What a clip of the motion world shows: exactly, for the judge, and in parts, for the reward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from recipes.worlds.motion import (
    CLIP_FPS,
    MAX_SHIFT,
    STEP,
    Motion,
    all_motions,
    motion_in_caption,
    render_frames,
)
from recipes.worlds.shapes import COLOURS, PAPER
from unirl.types import Sample, Scores

__all__ = ["MotionJudge", "MotionReward"]

FILLED = {"triangle": 0.5, "circle": 0.785, "square": 1.0}
"""Share of its bounding box that each shape fills."""


class MotionJudge:
    """Finds the motion whose drawing comes nearest to the clip, and compares it with the words.

    Never a reward.
    """

    def read(self, clip: np.ndarray) -> Motion:
        """Return the motion in a clip, uint8 (F, 32, 32, 3), F frames of one second."""
        motions, drawings = _drawings()
        gaps = ((drawings - clip.astype(np.float32).ravel()) ** 2).sum(axis=1)
        return motions[int(gaps.argmin())]

    def judge(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return float64 (B,): 1.0 where the words name the motion of the clip, NaN without a clip."""
        verdicts = []
        for sample in samples:
            if sample.clip is None:
                verdicts.append(np.nan)
                continue
            named = motion_in_caption(sample.caption)
            verdicts.append(float(named is not None and named == self.read(sample.clip)))
        return np.array(verdicts, dtype=np.float64)


@lru_cache(maxsize=1)
def _drawings() -> tuple[list[Motion], np.ndarray]:
    """Every motion on every path, float32 (n, F * 32 * 32 * 3)."""
    cases = [(motion, shift) for motion in all_motions() for shift in range(-MAX_SHIFT, MAX_SHIFT + 1)]
    frames = [render_frames(motion, shift=shift, fps=CLIP_FPS).ravel() for motion, shift in cases]
    return [motion for motion, _ in cases], np.stack(frames).astype(np.float32)


class MotionReward:
    """A rule that measures the clip's pixels and counts the words that agree.

        total = (colour + shape + heading) / 3,   each 1 or 0

    Colour is that of the pixels that are not paper, shape follows from how much of its bounding box they fill
    in the middle of the clip, heading from where they are at its end and at its beginning. Words that are no
    caption of the world get 0; a sample without a clip has no score. The measurements are rougher than the
    judge, and share nothing with it.
    """

    identity = "recipes.worlds.motion_judge.MotionReward"

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Score B samples."""
        parts = np.array([self._agreement(sample) for sample in samples], dtype=np.float64).reshape(-1, 3)
        names = ("colour", "shape", "heading")
        return Scores(
            total=parts.mean(axis=1), components={name: parts[:, i] for i, name in enumerate(names)}
        )

    def _agreement(self, sample: Sample) -> tuple[float, float, float]:
        if sample.clip is None:
            return (np.nan, np.nan, np.nan)
        named = motion_in_caption(sample.caption)
        if named is None:
            return (0.0, 0.0, 0.0)
        colour, shape, heading = _measure(sample.clip.astype(np.float64))
        return (float(named.colour == colour), float(named.shape == shape), float(named.heading == heading))


def _measure(clip: np.ndarray) -> tuple[str, str, str]:
    is_drawn = np.abs(clip - PAPER).sum(axis=-1) > 90
    seen = np.median(clip[is_drawn], axis=0) if is_drawn.any() else np.array(PAPER)
    colour = min(COLOURS, key=lambda name: float(np.abs(seen - COLOURS[name]).sum()))
    centres = [_centre(frame) for frame in is_drawn]
    way = centres[-1] - centres[0]
    heading = max(STEP, key=lambda name: float(way @ np.array(STEP[name])))
    filled = _filled(is_drawn[len(clip) // 2])
    return colour, min(FILLED, key=lambda name: abs(FILLED[name] - filled)), heading


def _centre(is_drawn: np.ndarray) -> np.ndarray:
    """Column and row of the middle of what is drawn."""
    rows, columns = np.nonzero(is_drawn)
    return np.array([columns.mean(), rows.mean()]) if len(rows) else np.zeros(2)


def _filled(is_drawn: np.ndarray) -> float:
    rows, columns = np.nonzero(is_drawn)
    if not len(rows):
        return 0.0
    return float(len(rows) / (np.ptp(rows) + 1) / (np.ptp(columns) + 1))
