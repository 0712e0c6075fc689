"""Where what was made of the rows of a batch becomes a batch of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Batch", "Tokens", "as_images", "as_tensor", "pad_tokens", "write_pixels"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """The texts of a batch, padded to the longest. "a b" and "c" are ids [[5, 6], [7, 0]], lengths [2, 1]."""

    ids: Tensor  # int64 (B, T)
    lengths: Tensor  # int64 (B,), ids of each text; the rest of its row is padding
    mask: Tensor  # bool (B, T), True where there is an id
    num_tokens: int  # ids of all texts together


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a training step takes. Filled by the Loader; the caller owns it and may write to it.

    For a batch of two 32x32 pictures with their codes:
    rows [17, 4], keys ["a", "b"], images (2, 3, 32, 32), tensors {"codes": (2, 64)},
    columns {"caption": ["a handwritten four", "a handwritten nine"]}.
    """

    rows: NDArray[np.int64]  # (B,) row ids in the store; of several stores see JoinedView.locate
    read_keys: Callable[[], list[str]] = field(repr=False)  # what `keys` asks, once
    images: Tensor | None  # (B, 3, H, W): float32 -1 black to 1 white, or what the transforms give; or uint8
    tensors: Mapping[str, Tensor]  # tensor column or field -> (B, *shape), its dtype
    columns: Mapping[str, list[Any]]  # column name -> B values: str, int, float, bool or None
    tokens: Mapping[str, Tokens] = field(default_factory=dict)  # text column -> its ids

    def __len__(self) -> int:
        return len(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "keys": self.keys, "read_keys": self.keys.copy}  # the store stays here

    @cached_property
    def keys(self) -> list[str]:
        """B keys. A batch that took no work for each row reads them when they are first asked for.

        Raises:
            CorruptionError: If they do not match their checksum.
        """
        return self.read_keys()


def write_pixels(pixels: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """Write uint8 (H, W, 3) into float32 (3, H, W), mapping 0..255 to -1..1."""
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1))  # a copy of bytes costs less than strided floats
    np.multiply(planes, np.float32(1 / 127.5), out=out)
    np.subtract(out, np.float32(1), out=out)


def as_tensor(array: NDArray[Any]) -> Tensor:
    """Wrap an array without a copy."""
    return torch.from_numpy(array)


def as_images(array: NDArray[Any], *, is_uint8: bool) -> Tensor:
    """Pictures (B, 3, H, W), of uint8 in channels_last memory, without a copy."""
    return as_tensor(array).permute(0, 3, 1, 2) if is_uint8 else as_tensor(array)


def pad_tokens(ids: Sequence[NDArray[np.int64]], *, pad_id: int, multiple_of: int) -> Tokens:
    """Put texts into one array, padded at the end to the longest, or on to a multiple."""
    lengths = np.array([len(text) for text in ids], np.int64)
    longest = int(lengths.max(initial=0))
    width = -(-longest // multiple_of) * multiple_of
    padded = np.full((len(ids), width), pad_id, np.int64)
    mask = np.arange(width) < lengths[:, None]
    for row, text in zip(padded, ids):
        row[: len(text)] = text
    return Tokens(
        ids=as_tensor(padded), lengths=as_tensor(lengths), mask=as_tensor(mask), num_tokens=int(lengths.sum())
    )
