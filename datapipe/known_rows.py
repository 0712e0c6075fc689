"""Which rows the store had before an ingest, and which keys and contents the ingest has met."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa

from datapipe.identity import content_id, key_id, picture_id
from datapipe.identity_set import IdentitySet
from datapipe.judge import INDEX_KINDS
from datapipe.sources.fields import INDEX_COLUMNS
from storage import FeatureStore, View

__all__ = ["KnownRow", "KnownRows", "place_of_content", "place_of_row"]

_COLUMNS = ("key", "source", "place", "caption", "hash", "source_hash")
_BATCH_ROWS = 65536
_NOT_CONTENT = (INDEX_COLUMNS | INDEX_KINDS.keys()) - {"caption", "frame"}
_MAX_SAME = 100  # rows with one picture that are looked through for a caption


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownRow:
    """Where a key stands already."""

    row: int  # in the store
    source: str | None
    place: str | None
    caption: str | None
    hash: str | None  # of the blob
    source_hash: str | None  # of the file as it came, where the blob is another encoding

    @property
    def content_hash(self) -> str | None:
        """xxh3_128 of the file as it came."""
        return self.hash if self.source_hash is None else self.source_hash

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
        empty = pa.table({"key": pa.nulls(0, pa.string())})
        view = None if store is None else store.select()
        self._table: pa.Table = empty if view is None else view.to_arrow(present)
        self._rows = np.empty(0, np.int64) if view is None else view.rows
        ids = np.fromiter((key_id(key) for key in self._values("key")), np.uint64, len(self._table))
        self._order = np.argsort(ids, kind="stable")
        self._ids = ids[self._order]
        self.seen_keys = IdentitySet()
        self.contents = IdentitySet()
        self.pictures = IdentitySet()
        for digest, row in zip(self._content_hashes(), _described(store, self._table)):
            if digest is not None:
                self.contents.add(content_id(digest, row.pop("caption", None), row.pop("frame", None), row))
                self.pictures.add(picture_id(digest))

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
                return KnownRow(row=int(self._rows[position]), **values)
            at += 1
        return None

    def _content_hashes(self) -> Iterator[str | None]:
        """Of the file as it came, row by row."""
        for digest, source in zip(self._values("hash"), self._values("source_hash")):
            yield digest if source is None else source

    def has_any(self, identities: Collection[int]) -> bool:
        """Whether a key of one of these identities may be in the snapshot."""
        if len(self._ids) == 0 or not identities:
            return False
        wanted = np.fromiter(identities, np.uint64, len(identities))
        at = np.minimum(np.searchsorted(self._ids, wanted), len(self._ids) - 1)
        return bool((self._ids[at] == wanted).any())

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


def place_of_content(store: FeatureStore, digest: str, caption: str | None) -> str | None:
    """Where a row with these bytes and this caption came from; None when the store has none."""
    present = [name for name in ("hash", "source_hash") if name in store.columns]
    condition = " OR ".join(f"{name} = '{digest}'" for name in present)
    found = store.select(condition, limit=_MAX_SAME).to_arrow(["key", "source", "place", "caption"])
    for row in found.to_pylist():
        if row["caption"] == caption:
            return f"{row['place']} of {row['source']}"
    return None


def _described(store: FeatureStore | None, keys: pa.Table) -> Iterator[dict[str, Any]]:
    """Caption, frame and the user's columns of each row, a bounded number at a time."""
    names = [] if store is None else sorted(set(store.columns) - _NOT_CONTENT)
    if store is None or not names:
        yield from ({} for _ in range(len(keys)))
        return
    view = store.select()
    for start in range(0, len(view), _BATCH_ROWS):
        yield from view[start : start + _BATCH_ROWS].to_arrow(names).to_pylist()
