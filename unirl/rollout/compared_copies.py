"""Copies within one process, of which every byte is compared with its source."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["copy_compared", "same_bytes"]

BLOCK_BYTES = 1 << 21
"""Copied and compared before it leaves the processor's cache; smaller blocks wait for the interpreter."""

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def copy_compared(target: Tensor, source: Tensor) -> bool:
    """Copy a tensor, and tell whether the target then holds the bytes of the source.

    Args:
        target: Contiguous.
        source: Contiguous, of the same shape, dtype and device. May be copied by several threads at a time.
    """
    if target.device.type != "cpu":
        target.copy_(source)
        return same_bytes(target, source)
    written, read = _bytes(target).numpy(), _bytes(source).numpy()
    is_same = True
    for start in range(0, len(read), BLOCK_BYTES):
        place, block = written[start : start + BLOCK_BYTES], read[start : start + BLOCK_BYTES]
        np.copyto(place, block)
        is_same = is_same and _is_equal(place, block)
    return is_same


def same_bytes(first: Tensor, second: Tensor) -> bool:
    """Whether two contiguous tensors of one device hold the same bytes. A NaN equals itself."""
    if first.device.type != "cpu":
        return torch.equal(_bytes(first), _bytes(second))
    return first.nbytes == second.nbytes and _is_equal(_bytes(first).numpy(), _bytes(second).numpy())


def _is_equal(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> bool:
    # Unlike numpy's comparison this makes no third array, and it lets go of the interpreter just once.
    return int(_memcmp(first.ctypes.data, second.ctypes.data, len(first))) == 0


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
