"""Key -> row over all parts of a snapshot."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64_intdigest

from storage.keys import encode_key
from storage.manifest import Part

if TYPE_CHECKING:
    from storage.shards import PartReader

__all__ = ["KeyIndex"]

_LARGE_ROWS = 1 << 20
_RANGE_KEYS = 16
_SLICE_KEYS = 1 << 20


class KeyIndex:
    """Where the keys of a snapshot lie: the mapped table of each large part, and directories of small parts.

    A directory tells in which of its parts a key can be, and holds two or three bytes a row in memory. There
    are few: when parts are added, directories of less than twice their size are made anew with them.
    """

    def __init__(self, parts: Sequence[Part], reader_of: Callable[[Part], PartReader], policy: str) -> None:
        self.parts: tuple[Part, ...] = ()
        self._reader_of = reader_of
        self._policy = policy
        self._large: list[_PartRun] = []
        self._small: list[_PartRun | _Directory] = []
        self._add(parts)

    def extended(self, parts: Sequence[Part]) -> KeyIndex:
        """The index of `parts`, of which this index has the first ones."""
        index = KeyIndex((), self._reader_of, self._policy)
        index.parts = self.parts
        index._large = list(self._large)
        index._small = list(self._small)
        index._add(parts[len(self.parts) :])
        return index

    def find(self, key: str, deleted: np.ndarray) -> int | None:
        """The global row of a key that is not among the ascending `deleted` rows, or None."""
        encoded = encode_key(key)
        key_hash = xxh3_64_intdigest(encoded)
        for run in self._runs:
            row = run.find(encoded, key_hash, deleted)
            if row is not None:
                return row
        return None

    def _add(self, parts: Sequence[Part]) -> None:
        self.parts = (*self.parts, *parts)
        added = [_PartRun(self._reader_of(part), self._policy) for part in parts]
        self._large += [run for run in added if run.num_rows >= _LARGE_ROWS]
        small = [run for run in added if run.num_rows < _LARGE_ROWS]
        if small:
            while self._small and self._small[-1].num_rows < 2 * sum(run.num_rows for run in small):
                small = self._small.pop().runs + small
            self._small.append(small[0] if len(small) == 1 else _Directory(small))
        self._runs = [*self._large, *self._small]


class _PartRun:
    """One part, on its mapped table."""

    __slots__ = ("_first_row", "_reader", "num_rows", "table")

    def __init__(self, reader: PartReader, policy: str) -> None:
        self._reader = reader
        self._first_row = reader.part.first_row if reader.part.row_ids is None else None
        self.table = reader.keys(policy)
        self.num_rows = reader.part.rows

    @property
    def runs(self) -> list[_PartRun]:
        return [self]

    def find(self, key: bytes, key_hash: int, deleted: np.ndarray) -> int | None:
        local = self.table.find(key, key_hash)
        if local is None:
            return None
        if self._first_row is not None:
            row = self._first_row + local
        else:
            row = int(self._reader.global_rows(np.array([local]))[0])
        return None if len(deleted) and _contains(deleted, row) else row


class _Directory:
    """Several parts: 8 bits of the hash of every key, in the order of the hashes, and the part of the key.

    The leading bits of a hash choose a range of about sixteen keys, the next 8 mostly one key of these.
    """

    def __init__(self, runs: list[_PartRun]) -> None:
        self.runs = runs
        self.num_rows = sum(run.num_rows for run in runs)
        range_bits = (self.num_rows // _RANGE_KEYS).bit_length()
        self._shift = 64 - range_bits
        self._tag_shift = 56 - range_bits
        tags = np.empty(self.num_rows, np.uint8)
        owners = np.empty(self.num_rows, np.min_scalar_type(len(runs)))
        starts = np.full((1 << range_bits) + 1, self.num_rows, np.min_scalar_type(self.num_rows))
        self._fill(tags, owners, starts)
        self._tags, self._owners, self._starts = tags.data, owners.data, starts.data

    def _fill(self, tags: np.ndarray, owners: np.ndarray, starts: np.ndarray) -> None:
        """Merge the hashes of the parts, one slice of their range after the other to bound memory."""
        slice_bits = (self.num_rows // _SLICE_KEYS).bit_length()
        lowest = _multiples(slice_bits, 64 - slice_bits)
        hashes = [run.table.sorted_hash for run in self.runs]
        cuts = np.array([[*part.searchsorted(lowest).tolist(), len(part)] for part in hashes])
        ranges = (len(starts) - 1) >> slice_bits
        firsts = _multiples(64 - self._shift, self._shift)
        done = 0
        for number in range(len(lowest)):
            begins, ends = cuts[:, number].tolist(), cuts[:, number + 1].tolist()
            merged = np.concatenate([part[a:b] for part, a, b in zip(hashes, begins, ends)])
            order = np.argsort(merged, kind="stable")
            merged = merged[order]
            mine = slice(done, done + len(merged))
            tags[mine] = (merged >> np.uint64(self._tag_shift)).astype(np.uint8)
            owners[mine] = np.repeat(np.arange(len(hashes), dtype=owners.dtype), np.subtract(ends, begins))[
                order
            ]
            here = slice(number * ranges, (number + 1) * ranges)
            starts[here] = done + merged.searchsorted(firsts[here])
            done += len(merged)

    def find(self, key: bytes, key_hash: int, deleted: np.ndarray) -> int | None:
        tags = self._tags
        tag = key_hash >> self._tag_shift & 0xFF
        number = key_hash >> self._shift
        stop = self._starts[number + 1]
        at = bisect_left(tags, tag, self._starts[number], stop)
        while at < stop and tags[at] == tag:
            row = self.runs[self._owners[at]].find(key, key_hash, deleted)
            if row is not None:
                return row
            at += 1
        return None


def _multiples(bits: int, shift: int) -> np.ndarray:
    """uint64: all numbers of so many bits, shifted."""
    return np.arange(1 << bits, dtype=np.uint64) << np.uint64(shift % 64)


def _contains(ascending: np.ndarray, value: int) -> bool:
    at = int(ascending.searchsorted(value))
    return at < len(ascending) and int(ascending[at]) == value
