"""What an ingest does with pictures and videos: budgets, frames, a new size or coding, tensors on the way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from PIL import ImageColor

from datapipe.decode.image import DEFAULT_MAX_PIXELS, WHITE
from datapipe.errors import DataError
from datapipe.sources.fields import INDEX_COLUMNS

__all__ = [
    "Encoding",
    "FramePolicy",
    "MediaRules",
    "Resizing",
    "TensorRule",
    "parse_background",
    "parse_encoding",
    "parse_resizing",
    "parse_tensor",
]

FramePolicy = Literal["first", "all", "skip"]
_TENSOR: Final = re.compile(r"(?P<name>[^:]+):(?P<dtype>\w+)\[(?P<shape>[\d, ]*)\]")
_TENSOR_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")  # as the store wants it
_TENSOR_DTYPES: Final = ("uint8", "float16", "float32")
_MAX_SIDE: Final = 65_535
_QUALITIES: Final = {"jpeg": 95, "webp": 95}  # when none is given


@dataclass(frozen=True, kw_only=True, slots=True)
class Resizing:
    """A new size: both sides exactly, or the larger side at most, which never enlarges."""

    width: int  # pixels
    height: int
    is_exact: bool

    def size_for(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) that a picture of this size gets."""
        if self.is_exact:
            return self.height, self.width
        longest = max(height, width)
        if longest <= self.width:
            return height, width
        return max(1, round(height * self.width / longest)), max(1, round(width * self.width / longest))


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """How pixels become a blob."""

    format: Literal["jpeg", "webp", "png"]
    quality: int | None  # 1..100; None for PNG


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRule:
    """A tensor column of pixels, channels first: uint8 0..255, or floats from -1 black to 1 white."""

    name: str
    dtype: Literal["uint8", "float16", "float32"]
    height: int  # pixels
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return (3, self.height, self.width)


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaRules:
    """Filled by the arguments of `ingest`."""

    max_pixels: int = DEFAULT_MAX_PIXELS
    background: tuple[int, int, int] = WHITE
    frames: FramePolicy = "first"
    trust: bool = False
    resize: Resizing | None = None
    encoding: Encoding | None = None
    tensors: tuple[TensorRule, ...] = ()

    def __post_init__(self) -> None:
        if self.frames not in get_args(FramePolicy):
            raise DataError(f"frames is {self.frames!r}, wanted one of {', '.join(get_args(FramePolicy))}")
        names = [rule.name for rule in self.tensors]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(f"tensor column {twice[0]!r} is asked for twice; give each a name of its own")
        if self.trust and (self.needs_pixels or self.frames == "all"):
            raise DataError(
                "trust reads headers only, so that it does not go with resize, reencode, tensor or "
                "frames=all; leave one of them out"
            )

    @property
    def needs_pixels(self) -> bool:
        """Whether whole pictures have to be put together, and not only checked."""
        return bool(self.resize or self.encoding or self.tensors)

    def tensor_columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape), as the store declares them."""
        return {rule.name: (rule.dtype, rule.shape) for rule in self.tensors}


def parse_resizing(text: str) -> Resizing:
    """Read `512` (the larger side is at most 512) or `384x256` (width x height, exactly).

    Raises:
        DataError: For anything else.
    """
    sides = text.split("x")
    if not 1 <= len(sides) <= 2 or not all(
        side.isdecimal() and 1 <= int(side) <= _MAX_SIDE for side in sides
    ):
        raise DataError(
            f"resize is {text!r}; wanted the larger side, such as 512, or WIDTHxHEIGHT, such as 384x256, "
            f"with sides from 1 to {_MAX_SIDE}"
        )
    width, height = int(sides[0]), int(sides[-1])
    return Resizing(width=width, height=height, is_exact=len(sides) == 2)


def parse_encoding(text: str) -> Encoding:
    """Read `jpeg:90`, `webp:90` or `png`; without a number the quality is 95.

    Raises:
        DataError: For anything else.
    """
    name, colon, number = text.partition(":")
    if name == "png" and not colon:
        return Encoding(format="png", quality=None)
    if name not in _QUALITIES or (colon and not (number.isdecimal() and 1 <= int(number) <= 100)):
        raise DataError(
            f"reencode is {text!r}; wanted jpeg:QUALITY or webp:QUALITY with a quality from 1 to 100, or png"
        )
    format: Literal["jpeg", "webp"] = "jpeg" if name == "jpeg" else "webp"
    return Encoding(format=format, quality=int(number) if colon else _QUALITIES[name])


def parse_tensor(text: str) -> TensorRule:
    """Read `NAME:DTYPE[3,HEIGHT,WIDTH]`, such as `pixels:uint8[3,224,224]`.

    Raises:
        DataError: For anything else.
    """
    found = _TENSOR.fullmatch(text)
    sides = [int(part) for part in found["shape"].split(",") if part.strip()] if found else []
    problem = (
        "it has another form"
        if found is None
        else f"dtype {found['dtype']!r} is none of {', '.join(_TENSOR_DTYPES)}"
        if found["dtype"] not in _TENSOR_DTYPES
        else f"the shape {sides} is not [3, height, width]"
        if len(sides) != 3 or sides[0] != 3 or not all(1 <= side <= _MAX_SIDE for side in sides)
        else None
    )
    if problem is None and found is not None:
        problem = _name_problem(found["name"])
    if found is None or problem is not None:
        raise DataError(
            f"tensor is {text!r}: {problem}; wanted NAME:DTYPE[3,HEIGHT,WIDTH], such as "
            "pixels:uint8[3,224,224]"
        )
    dtype = _TENSOR_DTYPES[_TENSOR_DTYPES.index(found["dtype"])]
    return TensorRule(name=found["name"], dtype=dtype, height=sides[1], width=sides[2])  # type: ignore[arg-type]


def _name_problem(name: str) -> str | None:
    if name.casefold() in INDEX_COLUMNS:
        return f"{name!r} is a column of the index already; choose another name"
    if not _TENSOR_NAME.fullmatch(name):
        return "the name has 1 to 128 letters, digits, '_', '-' and '.', and does not begin with '-' or '.'"
    return None


def parse_background(value: str | Sequence[int]) -> tuple[int, int, int]:
    """Read a colour: a name or `#rrggbb` as in HTML, `R,G,B`, or three numbers 0..255.

    Raises:
        DataError: For anything else.
    """
    text = value if isinstance(value, str) else ",".join(map(str, value))
    parts = text.split(",")
    if len(parts) == 3 and all(part.strip().isdecimal() and int(part) <= 255 for part in parts):
        return int(parts[0]), int(parts[1]), int(parts[2])
    try:
        return ImageColor.getrgb(text)[:3]
    except ValueError as error:
        raise DataError(
            f"background is {text!r}; wanted a name such as white, #rrggbb, or R,G,B with numbers 0 to 255"
        ) from error
