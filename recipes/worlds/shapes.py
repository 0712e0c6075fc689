"""Made scenes: one or two coloured shapes on 32x32 paper, with captions that say exactly what is there.

Two sizes, four colours, three shapes and four places make 96 scenes of one shape; some of these are held out
of all training, though each size, colour, shape and place is seen often.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from PIL import Image, ImageDraw

from recipes.worlds.world_files import Picture, WorldFiles, write_world
from unirl.errors import ConfigError

__all__ = [
    "Scene",
    "Thing",
    "all_captions",
    "all_scenes",
    "caption_of",
    "choose_held_out",
    "draw_scene",
    "scene_in_caption",
    "write_shapes",
]

Size = Literal["small", "large"]
Colour = Literal["red", "green", "blue", "yellow"]
Shape = Literal["circle", "square", "triangle"]
Place = Literal["left", "right", "top", "bottom"]

SIDE = 32
"""Height and width of a picture in pixels."""
PAPER = (244, 242, 236)
COLOURS: dict[Colour, tuple[int, int, int]] = {
    "red": (214, 54, 48),
    "green": (46, 160, 82),
    "blue": (44, 98, 204),
    "yellow": (240, 188, 36),
}
EXTENT: dict[Size, int] = {"small": 8, "large": 12}
"""Width of a shape in pixels."""
CENTRE: dict[Place, tuple[int, int]] = {
    "left": (8, 16),
    "right": (24, 16),
    "top": (16, 8),
    "bottom": (16, 24),
}
"""Column and row."""
JITTER = 1
"""Largest shift of a shape, in pixels, each way."""
_OPPOSITE: dict[Place, Place] = {"left": "right", "top": "bottom"}
_PHRASE: dict[Place, str] = {
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
}


@dataclass(frozen=True, slots=True, order=True)
class Thing:
    """One shape of a scene."""

    size: Size
    colour: Colour
    shape: Shape
    place: Place

    def __str__(self) -> str:
        return f"a {self.size} {self.colour} {self.shape} {_PHRASE[self.place]}"


Scene = tuple[Thing, ...]
"""One thing, or two at opposite places: left before right, top before bottom."""

_THINGS = tuple(
    Thing(size, colour, shape, place)
    for size, colour, shape, place in itertools.product(
        get_args(Size), get_args(Colour), get_args(Shape), get_args(Place)
    )
)
_THING_OF_WORDS = {str(thing): thing for thing in _THINGS}


def caption_of(scene: Scene) -> str:
    """Return "a large red circle on the left", or two such phrases joined by "and"."""
    return " and ".join(str(thing) for thing in scene)


def scene_in_caption(caption: str) -> Scene | None:
    """Read a caption back; None if it is not exactly of the form that `caption_of` writes."""
    things = [_THING_OF_WORDS.get(part) for part in caption.split(" and ")]
    scene = tuple(thing for thing in things if thing is not None)
    if len(scene) != len(things) or len(scene) > 2:
        return None
    if len(scene) == 2 and _OPPOSITE.get(scene[0].place) != scene[1].place:
        return None
    return scene


def all_scenes(*, max_things: int = 1) -> tuple[Scene, ...]:
    """Return the 96 scenes of one thing, followed by the 1,152 scenes of two if `max_things` is 2."""
    scenes: list[Scene] = [(thing,) for thing in _THINGS]
    if max_things == 2:
        pairs = itertools.product(_THINGS, _THINGS)
        scenes += [(one, other) for one, other in pairs if _OPPOSITE.get(one.place) == other.place]
    return tuple(scenes)


def all_captions(*, max_things: int = 1) -> tuple[str, ...]:
    """Return the caption of each scene of `all_scenes`, in its order."""
    return tuple(caption_of(scene) for scene in all_scenes(max_things=max_things))


def choose_held_out(seed: int, *, count: int = 16) -> tuple[Thing, ...]:
    """Choose things to hold out, so that each size, colour, shape and place is taken almost equally often.

    Raises:
        ConfigError: If the count is outside 0..48.
    """
    if not 0 <= count <= 48:
        raise ConfigError(f"count: found {count}, wanted 0 to 48 held-out things of 96")
    rng = np.random.default_rng([seed, 0])
    columns = [get_args(kind) for kind in (Size, Colour, Shape, Place)]
    while True:
        dealt = [rng.permutation(np.resize(values, count)).tolist() for values in columns]
        things = {Thing(*row) for row in zip(*dealt, strict=True)}
        if len(things) == count:
            return tuple(sorted(things))


def draw_scene(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Draw a scene, each thing shifted by up to a pixel; uint8 (32, 32, 3)."""
    picture = np.full((SIDE, SIDE, 3), PAPER, dtype=np.float64)
    for thing in scene:
        shift = rng.integers(-JITTER, JITTER + 1, 2)
        column, row = np.array(CENTRE[thing.place]) + shift
        coverage = shape_mask(thing.shape, EXTENT[thing.size], int(column), int(row))[:, :, None]
        picture += (np.array(COLOURS[thing.colour]) - picture) * coverage
    return np.rint(picture).astype(np.uint8)


def shape_mask(shape: Shape, extent: int, column: int, row: int) -> np.ndarray:
    """Return how much of each pixel a shape covers, `extent` pixels wide and high, around (column, row).

    float64 (32, 32) in [0, 1].
    """
    fine = 8
    canvas = Image.new("L", (SIDE * fine, SIDE * fine))
    half = extent / 2
    left, top, right, bottom = (
        (place * fine) for place in (column - half, row - half, column + half, row + half)
    )
    pen = ImageDraw.Draw(canvas)
    if shape == "circle":
        pen.ellipse((left, top, right - 1, bottom - 1), fill=255)
    elif shape == "square":
        pen.rectangle((left, top, right - 1, bottom - 1), fill=255)
    else:
        pen.polygon([(left, bottom - 1), (right - 1, bottom - 1), ((left + right) / 2, top)], fill=255)
    covered = np.asarray(canvas, dtype=np.float64) / 255
    mask: np.ndarray = covered.reshape(SIDE, fine, SIDE, fine).mean(axis=(1, 3))
    return mask


def write_shapes(
    directory: str | Path,
    *,
    seed: int,
    num_sft: int = 2000,
    num_rl: int = 1000,
    num_eval: int = 200,
    num_held_out: int = 16,
    max_things: int = 1,
) -> WorldFiles:
    """Write scenes with captions as ordinary files; see `world_files` for the layout.

    The same arguments give the same bytes. Half of the evaluation shows held-out things, and each half goes
    round its scenes evenly. Metadata columns: caption and split, and in rl and eval
    also held_out and num_things.

    Args:
        directory: Made if absent, kept if it holds this very world.
        seed: Chooses the held-out things and draws the scenes.
        num_sft: Pictures for tokenizer, supervised stage and reward model.
        num_rl: Pictures for RL prompts.
        num_eval: Pictures for evaluation.
        num_held_out: Things that occur in the evaluation only.
        max_things: 1, or 2 so that half of each split shows two things.

    Raises:
        ConfigError: If `directory` holds something else, or a setting cannot be met.
    """
    if max_things not in (1, 2):
        raise ConfigError(f"max_things: found {max_things}, wanted 1 or 2")
    hidden = frozenset(choose_held_out(seed, count=num_held_out))
    unseen = [scene for scene in all_scenes(max_things=max_things) if hidden.intersection(scene)]
    seen = [scene for scene in all_scenes(max_things=max_things) if not hidden.intersection(scene)]
    rngs = {
        split: np.random.default_rng([seed, 1, place]) for place, split in enumerate(("sft", "rl", "eval"))
    }
    num_unseen = num_eval // 2 if unseen else 0
    eval_scenes = _evenly(unseen, num_unseen, rngs["eval"]) + _evenly(
        seen, num_eval - num_unseen, rngs["eval"]
    )
    scenes = {
        "sft": _evenly(seen, num_sft, rngs["sft"]),
        "rl": _evenly(seen, num_rl, rngs["rl"]),
        "eval": [eval_scenes[place] for place in rngs["eval"].permutation(len(eval_scenes))],
    }
    parameters = {
        "world": "shapes",
        "seed": seed,
        "num_sft": num_sft,
        "num_rl": num_rl,
        "num_eval": num_eval,
        "num_held_out": num_held_out,
        "max_things": max_things,
    }
    return write_world(
        directory,
        {split: _pictures(scenes[split], rngs[split], hidden) for split in scenes},
        parameters=parameters,
        held_out=[caption_of(scene) for scene in unseen],
    )


def _evenly(scenes: Sequence[Scene], count: int, rng: np.random.Generator) -> list[Scene]:
    """Return `count` scenes in random order, half of them of two things if there are such scenes."""
    kinds = [
        group for group in ([s for s in scenes if len(s) == 1], [s for s in scenes if len(s) == 2]) if group
    ]
    chosen: list[Scene] = []
    for place, group in enumerate(kinds):
        share = (count + place) // len(kinds)
        rounds = [rng.permutation(len(group)) for _ in range(0, share, len(group))]
        chosen += [group[position] for position in np.concatenate([[], *rounds]).astype(int)[:share]]
    return [chosen[position] for position in rng.permutation(len(chosen))]


def _pictures(
    scenes: Sequence[Scene], rng: np.random.Generator, hidden: frozenset[Thing]
) -> Iterator[Picture]:
    for scene in scenes:
        yield Picture(
            image=draw_scene(scene, rng),
            caption=caption_of(scene),
            held_out=not hidden.isdisjoint(scene),
            facts={"num_things": len(scene)},
        )
