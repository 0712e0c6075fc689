"""Made clips: one coloured shape that crosses 32x32 paper in a second, with a caption that says so.

Four colours, three shapes and four directions make 48 motions; some of these are held out of all training,
though each colour, shape and direction is seen often. The clips are real video files (H.264 in MP4).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from recipes.worlds.shapes import COLOURS, PAPER, SIDE, Colour, Shape, shape_mask
from recipes.worlds.world_files import make_world
from unirl.errors import ConfigError

__all__ = [
    "CLIP_FPS",
    "DURATION_S",
    "MAX_HELD_OUT",
    "MAX_SHIFT",
    "Motion",
    "MotionFiles",
    "all_motions",
    "choose_held_out",
    "motion_captions",
    "motion_in_caption",
    "render_frames",
    "write_motion",
]

Heading = Literal["left", "right", "up", "down"]

DURATION_S = 1.0
VIDEO_FPS = 6
CLIP_FPS = 2
"""Frames a second that a clip is read with. They are seen at times at which the video has frames."""
EXTENT = 16
"""Width of a shape, pixels: two patches of the recipe's image tokenizer."""
REACH = 8
"""Pixels from the middle of the paper at which a path begins and ends."""
MAX_HELD_OUT = 24
"""Motions, of 48, that can be held out."""
MAX_SHIFT = 3
"""Largest distance of a path from the middle of the paper, pixels, each way."""
PAPER_SHADES = 6
"""Levels by which the paper of a clip is darker or lighter, in each colour, so that files differ."""
CODING = {"crf": "8", "preset": "ultrafast", "threads": "1"}
"""Compression changes a pixel by a few levels."""
STEP: dict[Heading, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Columns and rows."""


@dataclass(frozen=True, slots=True, order=True)
class Motion:
    """What a clip shows."""

    colour: Colour
    shape: Shape
    heading: Heading

    def __str__(self) -> str:
        return f"a {self.colour} {self.shape} moves {self.heading}"


_MOTIONS = tuple(
    Motion(colour, shape, heading)
    for colour, shape, heading in itertools.product(get_args(Colour), get_args(Shape), get_args(Heading))
)
_MOTION_OF_WORDS = {str(motion): motion for motion in _MOTIONS}


def all_motions() -> tuple[Motion, ...]:
    """Return all 48."""
    return _MOTIONS


def motion_captions() -> tuple[str, ...]:
    """Return the caption of each motion, "a red square moves left"."""
    return tuple(_MOTION_OF_WORDS)


def motion_in_caption(caption: str) -> Motion | None:
    """Read a caption back; None if it is not exactly of that form."""
    return _MOTION_OF_WORDS.get(caption)


def choose_held_out(seed: int, *, count: int = 12) -> tuple[Motion, ...]:
    """Choose motions to hold out, so that each colour, shape and heading is taken almost equally often.

    Raises:
        ConfigError: If the count is outside 0..MAX_HELD_OUT.
    """
    if not 0 <= count <= MAX_HELD_OUT:
        raise ConfigError(f"count: found {count}, wanted 0 to {MAX_HELD_OUT} held-out motions of 48")
    rng = np.random.default_rng([seed, 0])
    while True:
        dealt = [
            rng.permutation(np.resize(get_args(kind), count)).tolist() for kind in (Colour, Shape, Heading)
        ]
        motions = {Motion(*row) for row in zip(*dealt, strict=True)}
        if len(motions) == count:
            return tuple(sorted(motions))


def render_frames(
    motion: Motion, *, shift: int, fps: int, shade: Sequence[int] | np.ndarray = (0, 0, 0)
) -> np.ndarray:
    """Draw a clip, uint8 (F, 32, 32, 3), each frame as it is in the middle of its span.

    Args:
        motion: What is shown.
        shift: Distance of the path from the middle of the paper, pixels.
        fps: Frames a second.
        shade: Added to the three colours of the paper.
    """
    paper = np.array(PAPER) + shade
    across, down = STEP[motion.heading]
    frames = []
    for i in range(round(DURATION_S * fps)):
        along = round(REACH * (2 * (i + 0.5) / (DURATION_S * fps) - 1))
        column = SIDE // 2 + across * along + (shift if down else 0)
        row = SIDE // 2 + down * along + (shift if across else 0)
        coverage = _mask(motion.shape, column, row)[:, :, None]
        frames.append(paper + (np.array(COLOURS[motion.colour]) - paper) * coverage)
    pixels: np.ndarray = np.rint(np.stack(frames)).astype(np.uint8)
    return pixels


@cache
def _mask(shape: Shape, column: int, row: int) -> np.ndarray:
    return shape_mask(shape, EXTENT, column, row)


@dataclass(frozen=True, slots=True, kw_only=True)
class MotionFiles:
    """Where the clips lie: three folders of MP4 files, each with a table of captions."""

    sft: Path
    rl: Path
    eval: Path
    held_out: tuple[str, ...]
    """Captions that occur in `eval` only."""


def write_motion(
    directory: Path,
    *,
    seed: int,
    num_sft: int,
    num_rl: int,
    num_eval: int,
    num_held_out: int,
    num_sft_motions: int,
) -> MotionFiles:
    """Write clips with captions as ordinary files, unless they are there.

    The same arguments show the same pictures. Half of the evaluation shows held-out motions, and each half
    goes round its motions evenly.

    Args:
        directory: Made if absent, kept if it holds these very clips.
        seed: Chooses the held-out motions and where each path lies.
        num_sft, num_rl, num_eval: Clips of each split.
        num_held_out: Motions that occur in the evaluation only.
        num_sft_motions: Motions that occur in `sft`, out of the others, all of which occur in `rl`.

    Raises:
        ConfigError: If `directory` holds something else, a setting cannot be met, or PyAV is not installed.
    """
    hidden = choose_held_out(seed, count=num_held_out)
    seen = [motion for motion in _MOTIONS if motion not in hidden]
    num_unseen = num_eval // 2 if hidden else 0
    rng = np.random.default_rng([seed, 1])
    splits = {
        "sft": _evenly([seen[i] for i in rng.permutation(len(seen))[:num_sft_motions]], num_sft, rng),
        "rl": _evenly(seen, num_rl, rng),
        "eval": _evenly(hidden, num_unseen, rng) + _evenly(seen, num_eval - num_unseen, rng),
    }

    def write(root: Path) -> None:
        for split, motions in splits.items():
            _write_folder(root / split, split, motions, frozenset(hidden), rng)

    parameters = {
        "world": "motion",
        "seed": seed,
        "num_sft": num_sft,
        "num_rl": num_rl,
        "num_eval": num_eval,
        "num_held_out": num_held_out,
        "num_sft_motions": num_sft_motions,
    }
    make_world(directory, write, parameters=parameters)
    return MotionFiles(
        sft=directory / "sft",
        rl=directory / "rl",
        eval=directory / "eval",
        held_out=tuple(str(motion) for motion in hidden),
    )


def _evenly(motions: Sequence[Motion], count: int, rng: np.random.Generator) -> list[Motion]:
    """`count` motions in random order, round after round."""
    rounds: Iterator[Motion] = (motions[i] for _ in itertools.count() for i in rng.permutation(len(motions)))
    return list(itertools.islice(rounds, count))


def _write_folder(
    folder: Path, split: str, motions: Sequence[Motion], hidden: frozenset[Motion], rng: np.random.Generator
) -> None:
    folder.mkdir()
    with (folder / "metadata.jsonl").open("w", encoding="utf-8") as table:
        for number, motion in enumerate(motions):
            name = f"{number:05d}.mp4"
            shift = int(rng.integers(-MAX_SHIFT, MAX_SHIFT + 1))
            shade = rng.integers(-PAPER_SHADES, PAPER_SHADES + 1, 3)
            frames = render_frames(motion, shift=shift, fps=VIDEO_FPS, shade=shade)
            _write_video(folder / name, frames)
            row = {"file_name": name, "caption": str(motion), "split": split, "held_out": motion in hidden}
            table.write(json.dumps(row) + "\n")


def _write_video(path: Path, frames: np.ndarray) -> None:
    """H.264 in MP4."""
    av = _pyav()
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=VIDEO_FPS, options=CODING)
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for picture in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def _pyav() -> Any:
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            "clips are written with PyAV, which is not installed; install unirl[video]"
        ) from error
    return av
