"""Changes of one picture after decoding, random ones with a generator of the sample's own.

A transform is a callable of (image, generator): a uint8 or float Tensor (C, H, W) and a `torch.Generator`
that follows from (run seed, epoch, key) alone; it returns a Tensor (C, H, W). uint8 is 0..255 and float is
0..1 until `Normalize`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from datapipe.errors import DataError, LoaderError
from datapipe.whole_numbers import check_whole_numbers, whole_number

__all__ = [
    "CenterCrop",
    "ColorJitter",
    "HorizontalFlip",
    "Normalize",
    "RandomCrop",
    "RandomResizedCrop",
    "Resize",
    "Transform",
    "apply_transforms",
    "sample_generator",
    "sample_seed",
]

Transform = Callable[[Tensor, torch.Generator], Tensor]

_LUMA: Final = (0.299, 0.587, 0.114)
# RGB to luma and two chroma axes (YIQ); turning the chroma turns the hue and keeps the luma.
_YIQ: Final = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


def sample_generator(*, seed: int, epoch: int, key: str) -> torch.Generator:
    """A generator that depends on these three alone: not on ranks, threads, batches or resumes."""
    return torch.Generator().manual_seed(sample_seed(seed=seed, epoch=epoch, key=key))


def sample_seed(*, seed: int, epoch: int, key: str) -> int:
    """A seed that depends on these three alone, 0 <= it < 2**63."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def apply_transforms(image: Tensor, transforms: Sequence[Transform], generator: torch.Generator) -> Tensor:
    """Apply transforms one after the other."""
    for transform in transforms:
        image = transform(image, generator)
    return image


@dataclass(frozen=True, slots=True)
class Resize:
    """To (height, width), or the shorter side to a length with the aspect ratio kept; antialiased."""

    size: tuple[int, int] | int

    def __post_init__(self) -> None:
        if isinstance(self.size, tuple):
            _check_size(self, self.size)
        else:
            whole_number("size of Resize", self.size, 1)

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        if isinstance(self.size, tuple):
            return _resized(image, self.size)
        height, width = image.shape[-2:]
        factor = self.size / min(height, width)
        return _resized(image, (max(1, round(height * factor)), max(1, round(width * factor))))


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """The middle (height, width)."""

    size: tuple[int, int]

    def __post_init__(self) -> None:
        _check_size(self, self.size)

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        top, left = (room // 2 for room in _room(image, self.size))
        return image[:, top : top + self.size[0], left : left + self.size[1]]


@dataclass(frozen=True, slots=True)
class RandomCrop:
    """(height, width) at a place drawn evenly."""

    size: tuple[int, int]

    def __post_init__(self) -> None:
        _check_size(self, self.size)

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        top, left = (int(_uniform(generator, 0, room + 1)) for room in _room(image, self.size))
        return image[:, top : top + self.size[0], left : left + self.size[1]]


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A part of random area and aspect ratio, resized to (height, width).

    The ratio of width to height is drawn evenly in its logarithm; a part that does not fit is cut to fit.
    """

    size: tuple[int, int]
    area: tuple[float, float] = (0.25, 1.0)  # least and most of the picture's area
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # least and most width / height

    def __post_init__(self) -> None:
        _check_size(self, self.size)
        _check_range(self, "area", self.area, 1.0)
        _check_range(self, "ratio", self.ratio, math.inf)

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        height, width = image.shape[-2:]
        wanted = height * width * _uniform(generator, *self.area)
        ratio = math.exp(_uniform(generator, math.log(self.ratio[0]), math.log(self.ratio[1])))
        part = (
            min(height, max(1, round(math.sqrt(wanted / ratio)))),
            min(width, max(1, round(math.sqrt(wanted * ratio)))),
        )
        return _resized(RandomCrop(part)(image, generator), self.size)


@dataclass(frozen=True, slots=True)
class HorizontalFlip:
    """Mirror left to right with a probability."""

    probability: float = 0.5

    def __post_init__(self) -> None:
        _check_number(self, "probability", self.probability, 1.0)

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        return image.flip(-1) if _uniform(generator, 0, 1) < self.probability else image


@dataclass(frozen=True, slots=True)
class ColorJitter:
    """Random brightness, contrast and saturation, then hue, of RGB pictures.

    The first three are multiplied by a factor drawn evenly from 1 - x to 1 + x; the hue is turned in YIQ by
    -hue to +hue of a full circle. None is below 0, and the hue at most half a circle. Results are cut to the
    range of the picture.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            _check_number(self, name, getattr(self, name), math.inf)
        _check_number(self, "hue", self.hue, 0.5)

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        brightness, contrast, saturation = (
            _uniform(generator, max(0.0, 1 - spread), 1 + spread)
            for spread in (self.brightness, self.contrast, self.saturation)
        )
        angle = 2 * math.pi * _uniform(generator, -self.hue, self.hue)
        pixels = _as_float(image) * brightness
        pixels = _blend(pixels, _luma(pixels).mean(), contrast)
        pixels = _blend(pixels, _luma(pixels), saturation)
        if self.hue > 0:
            pixels = torch.einsum("dc,chw->dhw", _hue_matrix(angle), pixels)
        return _as_before(pixels.clamp(0, 1), image)


@dataclass(frozen=True, slots=True)
class Normalize:
    """(image - mean) / std for each channel, with the image as float 0..1. Gives float32."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise LoaderError(f"Normalize has {len(self.mean)} means and {len(self.std)} deviations")
        if not all(map(math.isfinite, self.mean)) or not all(0 < value < math.inf for value in self.std):
            raise LoaderError(
                f"Normalize has mean {self.mean} and std {self.std}; wanted finite means, deviations above 0"
            )

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        if len(image) != len(self.mean):
            raise DataError(f"Normalize is for {len(self.mean)} channels, the picture has {len(image)}")
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (_as_float(image) - mean) / std


def _check_size(transform: Transform, size: tuple[int, int]) -> None:
    name = f"size of {type(transform).__name__}"
    check_whole_numbers(name, size, 2, lowest=1, wanted="(height, width) in pixels")


def _check_number(transform: Transform, name: str, value: float, highest: float) -> None:
    if not (isinstance(value, int | float) and 0 <= value <= highest and value < math.inf):
        wanted = "0 or more" if highest == math.inf else f"0 to {highest:g}"
        raise LoaderError(f"{name} of {type(transform).__name__} is {value!r}, wanted a number, {wanted}")


def _check_range(transform: Transform, name: str, values: tuple[float, float], highest: float) -> None:
    for value in values:
        _check_number(transform, name, value, highest)
    if len(values) != 2 or not 0 < values[0] <= values[1]:
        raise LoaderError(
            f"{name} of {type(transform).__name__} is {values}, wanted the least, above 0, and the most"
        )


def _uniform(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))


def _as_float(image: Tensor) -> Tensor:
    return image.float() / 255 if image.dtype == torch.uint8 else image


def _as_before(pixels: Tensor, image: Tensor) -> Tensor:
    return (pixels * 255).round().to(torch.uint8) if image.dtype == torch.uint8 else pixels.to(image.dtype)


def _luma(pixels: Tensor) -> Tensor:
    return torch.einsum("c,chw->hw", torch.tensor(_LUMA, dtype=pixels.dtype), pixels)


def _blend(pixels: Tensor, other: Tensor, factor: float) -> Tensor:
    return (pixels * factor + other * (1 - factor)).clamp(0, 1)


def _hue_matrix(angle: float) -> Tensor:
    yiq = torch.tensor(_YIQ, dtype=torch.float64)
    turn = torch.eye(3, dtype=torch.float64)
    turn[1, 1] = turn[2, 2] = math.cos(angle)
    turn[2, 1] = math.sin(angle)
    turn[1, 2] = -math.sin(angle)
    turned: Tensor = (torch.linalg.inv(yiq) @ turn @ yiq).float()
    return turned


def _room(image: Tensor, size: tuple[int, int]) -> tuple[int, int]:
    height, width = image.shape[-2:]
    if height < size[0] or width < size[1]:
        raise DataError(
            f"a picture of {height}x{width} is smaller than the crop of {size[0]}x{size[1]}; resize it before"
        )
    return height - size[0], width - size[1]


def _resized(image: Tensor, size: tuple[int, int]) -> Tensor:
    if tuple(image.shape[-2:]) == size:
        return image
    pixels = functional.interpolate(image[None].float(), size=size, mode="bilinear", antialias=True)[0]
    return pixels.round().clamp(0, 255).to(torch.uint8) if image.dtype == torch.uint8 else pixels
