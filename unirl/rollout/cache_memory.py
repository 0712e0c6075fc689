"""Memory for a cache of keys and values."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["cache_zeros"]


def cache_zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on Linux in pages of 2 MB, where the system has them.

    A step touches one place in every row of every layer, each on a page of its own: of pages of 4 KB most
    are looked up in the page table again.
    """
    num = math.prod(shape)
    if device.type != "cpu" or not num or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num * dtype.itemsize)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=num).view(*shape)
