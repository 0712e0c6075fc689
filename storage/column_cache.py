"""Metadata columns that were read, kept as Arrow arrays up to a bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pyarrow as pa

from storage.fork_locks import new_lock

__all__ = ["ColumnCache"]


class ColumnCache:
    """Least recently used arrays go first; an array larger than the bound stays while it is the newest."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._arrays: OrderedDict[tuple[str, str], pa.Array] = OrderedDict()
        self._bytes = 0
        self._lock = new_lock(self, "_lock")

    def get(self, path: str, name: str, load: Callable[[], pa.Array]) -> pa.Array:
        """The array `name` of the file `path`, loaded when it is not held."""
        with self._lock:
            array = self._arrays.get((path, name))
            if array is not None:
                self._arrays.move_to_end((path, name))
                return array
        array = load()
        with self._lock:
            held = self._arrays.get((path, name))
            if held is not None:
                return held  # another thread was quicker; two copies would be kept
            self._arrays[path, name] = array
            self._bytes += array.nbytes
            while self._bytes > self._max_bytes and len(self._arrays) > 1:
                self._bytes -= self._arrays.popitem(last=False)[1].nbytes
        return array
