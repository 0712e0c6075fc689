"""Which rows the store had before an ingest, and which keys and contents the ingest has met."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import pyarrow as pa
import xxhash

from storage import FeatureStore, View

__all__ = ["KnownRow", "KnownRows", "content_id", "key_id", "place_of_row"]

_COLUMNS = ("key", "source", "place", "caption", "hash")
_BATCH_ROWS = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownRow:
    """Where a key stands already."""

    source: str | None
    place: str | None
    caption: str | None
    hash: str | None  # of the blob

    @property
    def full_place(self) -> str:
        return f"{self.place} of {self.source}"


class KnownRows:
    """The rows of one snapshot by key. Metadata stay in Arrow memory, keys are looked up by their hash."""

    def __init__(self, store: FeatureStore | None) -> None:
        """Args:
        store: The snapshot; None counts as one without rows.
        """
        present = [name for name in _COLUMNS if store is not None and name in store.columns]
        empty = pa.table({"key": pa.array([], pa.string())})
        self._table: pa.Table = empty if store is None else store.select().to_arrow(present)
        ids = np.fromiter((key_id(key) for key in self._values("key")), np.uint64, len(self._table))
        self._order = np.argsort(ids, kind="stable")
        self._ids = ids[self._order]
        self.seen_keys: set[int] = set()
        self.contents: set[int] = set(map(content_id, self._values("hash"), self._values("caption")))

    def find(self, key: str) -> KnownRow | None:
        """The row of a key in the snapshot, or None."""
        if len(self._ids) == 0:
            return None
        identity = np.uint64(key_id(key))
        at = int(np.searchsorted(self._ids, identity))
        while at < len(self._ids) and self._ids[at] == identity:
            position = int(self._order[at])
            if self._value("key", position) == key:
                values = {name: self._value(name, position) for name in _COLUMNS[1:]}
                return KnownRow(**values)
            at += 1
        return None

    def _value(self, name: str, position: int) -> str | None:
        if name not in self._table.column_names:
            return None
        value: str | None = self._table.column(name)[position].as_py()
        return value

    def _values(self, name: str) -> Iterator[str | None]:
        if name not in self._table.column_names:
            yield from repeat(None, len(self._table))
            return
        for batch in self._table.select([name]).to_batches(max_chunksize=_BATCH_ROWS):
            yield from batch.column(0).to_pylist()


def place_of_row(store: FeatureStore, key: str) -> str:
    """Where the row of a key in the store came from."""
    found = View(store, np.array([store.row(key)])).to_arrow(["source", "place"])
    return f"{found.column('place')[0].as_py()} of {found.column('source')[0].as_py()}"


def content_id(blob_hash: str | None, caption: str | None) -> int:
    """64-bit identity of a sample's blob and caption together."""
    return xxhash.xxh3_64_intdigest(f"{blob_hash}\0{caption}".encode())


def key_id(key: str | None) -> int:
    """64-bit identity of a key."""
    return xxhash.xxh3_64_intdigest((key or "").encode())
