"""Key -> row over all parts of a snapshot."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from storage.keys import SortedHashes, encode_key, hash_key
from storage.manifest import Part

if TYPE_CHECKING:
    from storage.shards import PartReader

__all__ = ["KeyIndex"]

_MERGED_ROWS = 1 << 21
_MAX_RUNS = 8


class KeyIndex:
    """Sorted runs of key hashes: one per large part, on its mapped table, and one merged of the small parts.

    The merged run holds 16 bytes a row in memory, for up to two million rows.
    """

    def __init__(self, parts: Sequence[Part], reader_of: Callable[[Part], PartReader], policy: str) -> None:
        self.parts = tuple(parts)
        self._reader_of = reader_of
        self._policy = policy
        self._starts = [part.first_row for part in parts]
        self._runs = self._make_runs(parts)

    def extended(self, parts: Sequence[Part]) -> KeyIndex:
        """The index of `parts`, of which this index has the first ones."""
        runs = self._runs + self._make_runs(parts[len(self.parts) :])
        if len(runs) > _MAX_RUNS + sum(part.rows >= _MERGED_ROWS for part in parts):
            return KeyIndex(parts, self._reader_of, self._policy)
        index = KeyIndex((), self._reader_of, self._policy)
        index.parts = tuple(parts)
        index._starts = [part.first_row for part in parts]
        index._runs = runs
        return index

    def find(self, key: str, deleted: np.ndarray) -> int | None:
        """The global row of a key that is not among the ascending `deleted` rows, or None."""
        encoded = encode_key(key)
        key_hash = hash_key(encoded)
        for hashes, rows in self._runs:
            at = hashes.first(key_hash)
            while hashes.has(at, key_hash):
                row = rows[at]
                if self._key_of(row) == encoded and not (len(deleted) and _contains(deleted, row)):
                    return row
                at += 1
        return None

    def _key_of(self, row: int) -> bytes:
        reader = self._reader_of(self.parts[bisect.bisect_right(self._starts, row) - 1])
        return reader.keys(self._policy).encoded_key(reader.local_row(row))

    def _make_runs(self, parts: Sequence[Part]) -> list[tuple[SortedHashes, memoryview]]:
        runs = []
        hashes, rows = [], []
        total = 0
        for part in sorted(parts, key=lambda part: part.rows):
            reader = self._reader_of(part)
            table = reader.keys(self._policy)
            global_rows = reader.global_rows(table.sorted_row)
            total += part.rows
            if total <= _MERGED_ROWS:
                hashes.append(table.sorted_hash)
                rows.append(global_rows)
            else:
                runs.append((table.hashes, global_rows.data))
        if hashes:
            merged = np.concatenate(hashes)
            order = np.argsort(merged, kind="stable")
            runs.append((SortedHashes(merged[order]), np.concatenate(rows)[order].data))
        return runs


def _contains(ascending: np.ndarray, value: int) -> bool:
    at = int(ascending.searchsorted(value))
    return at < len(ascending) and int(ascending[at]) == value
