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

_MERGED_ROWS = 1 << 20
_MAX_RUNS = 8


class KeyIndex:
    """Where the keys of a snapshot lie: the mapped tables of large parts, and one run merged of small ones.

    The merged run holds 17 bytes a row in memory, for up to a million rows; a single part needs none.
    """

    def __init__(self, parts: Sequence[Part], reader_of: Callable[[Part], PartReader], policy: str) -> None:
        self.parts = tuple(parts)
        self._reader_of = reader_of
        self._policy = policy
        self._runs = self._make_runs(parts)

    def extended(self, parts: Sequence[Part]) -> KeyIndex:
        """The index of `parts`, of which this index has the first ones."""
        runs = self._runs + self._make_runs(parts[len(self.parts) :])
        if len(runs) > _MAX_RUNS + sum(part.rows >= _MERGED_ROWS for part in parts):
            return KeyIndex(parts, self._reader_of, self._policy)
        index = KeyIndex((), self._reader_of, self._policy)
        index.parts = tuple(parts)
        index._runs = runs
        return index

    def find(self, key: str, deleted: np.ndarray) -> int | None:
        """The global row of a key that is not among the ascending `deleted` rows, or None."""
        encoded = encode_key(key)
        key_hash = hash_key(encoded)
        for run in self._runs:
            row = run.find(encoded, key_hash, deleted)
            if row is not None:
                return row
        return None

    def _make_runs(self, parts: Sequence[Part]) -> list[_PartRun | _MergedRun]:
        """Small parts go into the merged run until it is full."""
        readers = [self._reader_of(part) for part in sorted(parts, key=lambda part: part.rows)]
        ends = np.cumsum([reader.part.rows for reader in readers])
        num_small = int(np.searchsorted(ends, _MERGED_ROWS, side="right"))
        num_small = num_small if num_small > 1 else 0
        runs: list[_PartRun | _MergedRun] = [_PartRun(reader, self._policy) for reader in readers[num_small:]]
        if num_small:
            runs.append(_MergedRun(readers[:num_small], self._policy))
        return runs


class _PartRun:
    """One part, on its mapped table."""

    __slots__ = ("_find", "_first_row", "_reader")

    def __init__(self, reader: PartReader, policy: str) -> None:
        self._reader = reader
        self._find = reader.keys(policy).find
        self._first_row = reader.part.first_row if reader.part.row_ids is None else None

    def find(self, key: bytes, key_hash: int, deleted: np.ndarray) -> int | None:
        local = self._find(key, key_hash)
        if local is None:
            return None
        if self._first_row is not None:
            row = self._first_row + local
        else:
            row = int(self._reader.global_rows(np.array([local]))[0])
        return None if len(deleted) and _contains(deleted, row) else row


class _MergedRun:
    """Several parts, with their hashes sorted together. All but one row of a key are deleted."""

    __slots__ = ("_hashes", "_policy", "_readers", "_rows", "_starts")

    def __init__(self, readers: Sequence[PartReader], policy: str) -> None:
        self._readers = sorted(readers, key=lambda reader: reader.part.first_row)
        self._starts = [reader.part.first_row for reader in self._readers]
        self._policy = policy
        tables = [reader.keys(policy) for reader in self._readers]
        hashes = np.concatenate([table.sorted_hash for table in tables])
        rows = [reader.global_rows(table.sorted_row) for reader, table in zip(self._readers, tables)]
        order = np.argsort(hashes, kind="stable")
        self._hashes = SortedHashes(hashes[order])
        self._rows = np.concatenate(rows)[order].data

    def find(self, key: bytes, key_hash: int, deleted: np.ndarray) -> int | None:
        at = self._hashes.first(key_hash)
        while self._hashes.has(at, key_hash):
            row = self._rows[at]
            if self._key_of(row) == key and not (len(deleted) and _contains(deleted, row)):
                return row
            at += 1
        return None

    def _key_of(self, row: int) -> bytes:
        reader = self._readers[bisect.bisect_right(self._starts, row) - 1]
        return reader.keys(self._policy).encoded_key(reader.local_row(row))


def _contains(ascending: np.ndarray, value: int) -> bool:
    at = int(ascending.searchsorted(value))
    return at < len(ascending) and int(ascending[at]) == value
