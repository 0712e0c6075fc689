"""Where rows of the store become a batch of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Batch", "as_tensor", "write_pixels", "write_transformed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What a training step takes. Filled by the Loader; the caller owns it and may write to it.

    For a batch of two 32x32 pictures with their codes:
    rows [17, 4], keys ["a", "b"], images (2, 3, 32, 32), tensors {"codes": (2, 64)},
    columns {"caption": ["a handwritten four", "a handwritten nine"]}.
    """

    rows: NDArray[np.int64]  # (B,) row ids in the store
    keys: list[str]  # B keys
    images: (
        Tensor | None
    )  # float32 (B, 3, H, W), -1 black to 1 white, or what the transforms give; None without pictures
    tensors: Mapping[str, Tensor]  # column name -> (B, *shape), dtype of the column
    columns: Mapping[str, list[Any]]  # column name -> B values: str, int, float, bool or None

    def __len__(self) -> int:
        return len(self.rows)


def write_pixels(pixels: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """Write uint8 (H, W, 3) into float32 (3, H, W), mapping 0..255 to -1..1."""
    np.multiply(pixels.transpose(2, 0, 1), np.float32(1 / 127.5), out=out, casting="unsafe")
    np.subtract(out, np.float32(1), out=out)


def write_transformed(pixels: Tensor, out: NDArray[np.float32]) -> None:
    """Write (C, H, W) into float32 of the same shape: uint8 0..255 becomes -1..1, float is kept as it is."""
    target = torch.from_numpy(out)
    target.copy_(pixels)
    if pixels.dtype == torch.uint8:
        target.mul_(1 / 127.5).sub_(1)


def as_tensor(array: NDArray[np.generic]) -> Tensor:
    """Wrap an array without a copy."""
    return torch.from_numpy(array)
