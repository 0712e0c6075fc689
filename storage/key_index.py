"""Key -> row over all parts of a snapshot."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import numpy as np

from storage.keys import KeyTable, SortedHashes, encode_key, hash_key
from storage.manifest import Part

__all__ = ["KeyIndex"]

_MERGED_ROWS = 1 << 21
_MAX_RUNS = 8


class KeyIndex:
    """Sorted runs of key hashes: one per large part, on its mapped table, and one merged of the small parts.

    The merged run holds 16 bytes a row in memory, for up to two million rows.
    """

    def __init__(self, parts: Sequence[Part], table_of: Callable[[Part], KeyTable]) -> None:
        self.parts = tuple(parts)
        self._table_of = table_of
        self._starts = [part.first_row for part in parts]
        self._runs = _make_runs(parts, table_of)

    def extended(self, parts: Sequence[Part]) -> KeyIndex:
        """The index of `parts`, of which this index has the first ones."""
        added = parts[len(self.parts) :]
        runs = self._runs + _make_runs(added, self._table_of)
        if len(runs) > _MAX_RUNS + sum(part.rows >= _MERGED_ROWS for part in parts):
            return KeyIndex(parts, self._table_of)
        index = KeyIndex((), self._table_of)
        index.parts = tuple(parts)
        index._starts = [part.first_row for part in parts]
        index._runs = runs
        return index

    def find(self, key: str) -> int | None:
        """The global row of a key, or None."""
        encoded = encode_key(key)
        key_hash = hash_key(encoded)
        for hashes, rows in self._runs:
            at = hashes.first(key_hash)
            while hashes.has(at, key_hash):
                row = rows[at]
                part = self.parts[bisect.bisect_right(self._starts, row) - 1]
                if self._table_of(part).encoded_key(row - part.first_row) == encoded:
                    return row
                at += 1
        return None


def _make_runs(
    parts: Sequence[Part], table_of: Callable[[Part], KeyTable]
) -> list[tuple[SortedHashes, memoryview]]:
    runs = []
    small: list[Part] = []
    total = 0
    for part in sorted(parts, key=lambda part: part.rows):
        total += part.rows
        if total <= _MERGED_ROWS:
            small.append(part)
        else:
            table = table_of(part)
            runs.append((table.hashes, (table.sorted_row + part.first_row).data))
    if small:
        hashes = np.concatenate([table_of(part).sorted_hash for part in small])
        rows = np.concatenate([table_of(part).sorted_row + part.first_row for part in small])
        order = np.argsort(hashes, kind="stable")
        runs.append((SortedHashes(hashes[order]), rows[order].data))
    return runs
