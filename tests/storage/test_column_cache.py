"""Metadata columns in memory: one copy of each, whoever read it first."""

from __future__ import annotations

import pyarrow as pa

from storage.column_cache import ColumnCache


def test_two_readers_of_one_column_get_the_same_array() -> None:
    cache = ColumnCache(1 << 20)

    def load() -> pa.Array:
        cache.get("file", "column", lambda: first)  # another thread is quicker
        return pa.array([1])

    first = pa.array([1])
    assert cache.get("file", "column", load) is first
    assert cache.get("file", "column", load) is first
