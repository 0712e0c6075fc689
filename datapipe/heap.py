"""Giving freed memory back to the system, so that a long run holds no more than what it needs."""

from __future__ import annotations

import ctypes
from typing import Final

import pyarrow as pa

__all__ = ["release_freed_memory"]

_libc: Final = ctypes.CDLL(None)


def release_freed_memory() -> None:
    """Give back what C code and Arrow have freed and keep for later; a few milliseconds.

    The allocator of the GNU C library keeps most of it by itself. Where there is another one, nothing is done
    about it.
    """
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
    pa.default_memory_pool().release_unused()
