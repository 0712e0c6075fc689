"""What a row's file, text and columns become in a batch. Declarations only; the loader's stages read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from datapipe.decode.image import DEFAULT_MAX_PIXELS, WHITE
from datapipe.decode.resize import Resample, check_resample
from datapipe.errors import LoaderError
from datapipe.transforms import Transform
from datapipe.whole_numbers import check_whole_numbers, whole_number

__all__ = ["BatchContents", "Field", "ImageField", "RawSample", "TextField"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageField:
    """How blobs become pixels."""

    size: tuple[int, int] | None  # (height, width) pixels; others are resized; None keeps each one's own
    resample: Resample = "bilinear"  # filter of the resizing, antialiased by default
    background: tuple[int, int, int] = WHITE  # RGB 0..255 behind transparent pixels
    max_pixels: int = DEFAULT_MAX_PIXELS  # budget read from the header
    transforms: tuple[Transform, ...] = ()  # applied in order after decoding, see datapipe.transforms
    pixels: Literal["float32", "uint8"] = "float32"  # -1..1, or 0..255 in channels_last memory

    def __post_init__(self) -> None:
        check_resample(self.resample)
        if self.pixels not in ("float32", "uint8"):
            raise LoaderError(f"pixels is {self.pixels!r}, wanted 'float32' or 'uint8'")
        whole_number("max_pixels", self.max_pixels, 1)
        if self.size is not None:
            check_whole_numbers("size", self.size, 2, lowest=1, wanted="(height, width) in pixels, or None")
        check_whole_numbers(
            "background", self.background, 3, lowest=0, wanted="red, green and blue of 0..255"
        )
        if not isinstance(self.transforms, Sequence) or not all(map(callable, self.transforms)):
            raise LoaderError(
                f"transforms is {self.transforms!r}, wanted a tuple of functions, such as (flip,)"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TextField:
    """How a text column becomes token ids, padded to the longest text of the batch."""

    tokenizer: Callable[[str], Sequence[int] | NDArray[np.integer[Any]]]  # a text to its ids
    pad_id: int = 0
    max_tokens: int | None = None  # longer texts are cut at the end
    multiple_of: int = 1  # the padded length is a multiple of it

    def __post_init__(self) -> None:
        if not callable(self.tokenizer):
            raise LoaderError(f"tokenizer is {self.tokenizer!r}, wanted a function from a text to its ids")
        whole_number("pad_id", self.pad_id)
        whole_number("multiple_of", self.multiple_of, 1)
        if self.max_tokens is not None:
            whole_number("max_tokens", self.max_tokens, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSample:
    """What a field may know of one row. Filled by the fetch stage; it may be sent to a process."""

    key: str
    row: int  # in the store
    blob: memoryview | bytes | None  # the row's file; None unless a field needs it
    columns: Mapping[str, Any]  # the metadata columns that the loader's fields name; None without a value
    tensors: Mapping[str, NDArray[Any] | None]  # the tensor columns that they name; None without a value
    seed: int  # follows from (run seed, epoch, key) alone, 0 <= seed < 2**63


class Field(Protocol):
    """One array made from each row, all of one shape and dtype. With processes it is pickled to them."""

    @property
    def needs_blob(self) -> bool:
        """Whether `read` looks at the blob."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Metadata columns that `read` looks at."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Tensor columns that `read` looks at where the store has them and the row has a value."""

    def read(self, raw: RawSample) -> NDArray[Any]:
        """The array of one row. What it raises makes the row a bad sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchContents:
    """What a batch is to hold."""

    image: ImageField | None = None
    tensors: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    fields: Mapping[str, Field] = field(default_factory=dict)
    texts: Mapping[str, TextField] = field(default_factory=dict)

    @property
    def is_per_sample(self) -> bool:
        """Whether there is work to do for each row, beside reading it."""
        return self.image is not None or bool(self.fields) or bool(self.texts)

    @property
    def read_columns(self) -> tuple[str, ...]:
        """All metadata columns that have to be read."""
        of_fields = (name for made in self.fields.values() for name in made.columns)
        return tuple(dict.fromkeys([*self.columns, *self.texts, *of_fields]))

    @property
    def needs_blob(self) -> bool:
        return self.image is not None or any(made.needs_blob for made in self.fields.values())
