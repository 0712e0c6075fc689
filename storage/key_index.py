"""Key -> row over all parts of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from storage.keys import KeyTable, encode_key, hash_key
from storage.manifest import Part

__all__ = ["KeyIndex"]

_LARGE_PART_ROWS = 1 << 16


class KeyIndex:
    """Searches large parts in their mapped tables, the small ones in one merged array of 20 bytes a row."""

    def __init__(self, parts: Sequence[Part], tables: Sequence[KeyTable]) -> None:
        self._parts = parts
        self._tables = tables
        self._large = [i for i, table in enumerate(tables) if len(table) >= _LARGE_PART_ROWS]
        small = [i for i, table in enumerate(tables) if len(table) < _LARGE_PART_ROWS]
        hashes = [tables[i].sorted_hash for i in small]
        rows = [tables[i].sorted_row + parts[i].first_row for i in small]
        owners = [np.full(len(tables[i]), i, np.int32) for i in small]
        merged = np.concatenate(hashes) if small else np.empty(0, np.uint64)
        order = np.argsort(merged, kind="stable")
        self._hashes = merged[order]
        self._rows = (np.concatenate(rows) if small else np.empty(0, np.int64))[order]
        self._owners = (np.concatenate(owners) if small else np.empty(0, np.int32))[order]

    def find(self, key: str) -> int | None:
        """The global row of a key, or None."""
        encoded = encode_key(key)
        key_hash = hash_key(encoded)
        at = int(self._hashes.searchsorted(np.uint64(key_hash)))
        while at < len(self._hashes) and self._hashes[at] == key_hash:
            row, owner = int(self._rows[at]), int(self._owners[at])
            if self._tables[owner].key(row - self._parts[owner].first_row) == key:
                return row
            at += 1
        for part in self._large:
            local = self._tables[part].find(encoded, key_hash)
            if local is not None:
                return self._parts[part].first_row + local
        return None
