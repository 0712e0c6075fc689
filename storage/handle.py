"""A handle on one snapshot of a store: what everything that reads or changes the store begins with."""

from __future__ import annotations

import difflib
from pathlib import Path

from storage.backends import Backend, LocalBackend
from storage.errors import StorageError
from storage.leases import hold_snapshot
from storage.manifest import Snapshot
from storage.rows import RowMap
from storage.shards import VERIFY_POLICIES, Counters, PartReader, ReaderPool

__all__ = ["StoreHandle", "unknown_name"]


class StoreHandle:
    """A snapshot that is held, the readers of its parts, and the counters of this handle."""

    def __init__(
        self,
        backend: Backend,
        snapshot: Snapshot,
        verify: str,
        counters: Counters | None = None,
        readers: ReaderPool | None = None,
    ) -> None:
        if verify not in VERIFY_POLICIES:
            raise StorageError(f"verify={verify!r} is none of {', '.join(VERIFY_POLICIES)}")
        self.backend = backend
        self.snapshot = snapshot
        self.policy = verify
        self.counters = counters or Counters()
        self._pool = readers or ReaderPool(backend)
        self._readers: list[PartReader | None] = [None] * len(snapshot.parts)
        self._lease = hold_snapshot(backend, snapshot.id)
        self.row_map = RowMap(snapshot, self._pool)

    @property
    def url(self) -> str:
        """Where the store lies, as text: the path of a folder, or a URL."""
        return self.backend.url

    @property
    def path(self) -> Path:
        """The folder of the store.

        Raises:
            StorageError: If the store does not lie in a folder.
        """
        if isinstance(self.backend, LocalBackend):
            return self.backend.path
        raise StorageError(f"{self.url}: the store does not lie in a folder; use url instead of path")

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.url!r}, snapshot={self.snapshot.id}, {self.snapshot.num_rows} rows)"
        )

    def __len__(self) -> int:
        return self.snapshot.num_rows

    def part(self, index: int) -> PartReader:
        """The reader of the part at a position of `snapshot.parts`."""
        reader = self._readers[index]
        if reader is None:
            reader = self._readers[index] = self._pool.get(self.snapshot.parts[index])
        return reader


def unknown_name(what: str, name: str, known: list[str], url: str) -> str:
    """The message about a name that is not there: the nearest one, or all that there are."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known) or 'none'}"
    return f"{url}: there is no {what} {name!r}; {hint}"
