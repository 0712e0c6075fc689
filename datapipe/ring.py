"""Buffers of batches that are used again. Fresh memory costs as much as a tenth of decoding into it."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

__all__ = ["BufferRing"]

_ALIGN: Final = 64
_WASTE: Final = 2  # a buffer of more than this times what is wanted is let go


class BufferRing:
    """Lends arrays, and takes the memory back when nothing refers to it any more.

    An array, its views, and tensors made of them hold the memory, and so does whatever holds those: what was
    lent is never written to by anyone else while it can be reached. There is nothing to give back by hand.
    """

    def __init__(self, *, num_kept: int, is_pinned: bool = False) -> None:
        """Args:
        num_kept: Free buffers that are kept for the next loan; others go back to the system.
        is_pinned: Lock the pages, so that a GPU can copy from them on its own.
        """
        self._num_kept = num_kept
        self._is_pinned = is_pinned
        self._free: deque[Tensor] = deque()
        self._lent: dict[int, weakref.ref[NDArray[np.uint8]]] = {}
        self._numbers = 0
        self._lock = threading.Lock()

    @property
    def num_lent(self) -> int:
        """Buffers that something refers to."""
        return len(self._lent)

    @property
    def num_free(self) -> int:
        """Buffers that wait for the next loan."""
        return len(self._free)

    def lend(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array of any content, C-contiguous and writable."""
        kind = np.dtype(dtype)
        num_bytes = kind.itemsize * math.prod(shape)
        if num_bytes == 0:
            return np.empty(shape, kind)
        with self._lock:
            buffer = self._take(num_bytes)
            # Every view of `whole` has `whole` as its base, since the base of that is no array.
            whole: NDArray[np.uint8] = buffer.numpy()
            self._numbers += 1
            self._lent[self._numbers] = weakref.ref(whole, self._returner(self._numbers, buffer))
        return whole[:num_bytes].view(kind).reshape(shape)

    def clear(self) -> None:
        """Give the free buffers back to the system."""
        with self._lock:
            self._free.clear()

    def _take(self, num_bytes: int) -> Tensor:
        for _ in range(len(self._free)):
            buffer = self._free.pop()  # the last one used is the likeliest to be in the processor's cache
            if num_bytes <= buffer.numel() <= _WASTE * max(num_bytes, _ALIGN):
                return buffer
            self._free.appendleft(buffer)
        while len(self._free) >= max(1, self._num_kept):
            self._free.popleft()
        return torch.empty(-(-num_bytes // _ALIGN) * _ALIGN, dtype=torch.uint8, pin_memory=self._is_pinned)

    def _returner(self, number: int, buffer: Tensor) -> Callable[[object], None]:
        # The garbage collector may run this in any thread at any time: no lock, and no reference to the ring.
        return partial(_give_back, number, buffer, self._free, self._lent, self._num_kept)


def _give_back(
    number: int,
    buffer: Tensor,
    free: deque[Tensor],
    lent: dict[int, weakref.ref[NDArray[np.uint8]]],
    num_kept: int,
    _: object,
) -> None:
    lent.pop(number, None)
    if len(free) < num_kept:
        free.append(buffer)
