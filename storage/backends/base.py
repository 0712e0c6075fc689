"""Where the files of a store lie: the few things that everything else in `storage` asks of a place.

A store has three kinds of files. Control files (snapshots, tags) are small, complete or absent, and created
under a name that nobody else can take. Shards are large and never change. Staging folders hold what a writer
makes; they always are folders on this machine, because LMDB, Parquet and Arrow write to paths.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from storage.errors import CorruptionError
from storage.files import file_identity, map_descriptor
from storage.manifest import FileRef

__all__ = ["NEWEST", "Backend", "Lease", "StoredFile", "Workspace"]


NEWEST = "newest-snapshot"
"""The file with the number of a snapshot that was the newest one when it was written; no more than a hint."""


class Lease:
    """Something that is held for as long as this object lives."""

    def __init__(self, release: Callable[[], object]) -> None:
        self._finalizer = weakref.finalize(self, release)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of the store. path: relative to it; changed: seconds since 1970."""

    path: str
    bytes: int
    changed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """A folder on this machine for the files of one commit.

    close: removes it and says that its writer is gone.
    leave: says that its writer is gone, but leaves the folder to `reopen_workspace`.
    """

    path: Path
    close: Callable[[], None]
    leave: Callable[[], None]


class Backend(ABC):
    """The place of one store. Names are relative to it, with forward slashes.

    url: what errors say, and what opens the store again.
    identity: the same text for two objects of this process exactly if they are the same place.
    read_only: whether every method under "Writing" raises a StorageError that says what to do instead.
    evicts: whether shards may lose their place on this machine, so that none should stay mapped for long.
    """

    url: str
    identity: str
    read_only: bool
    evicts: bool = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def place(self, name: str) -> str:
        """A file as errors name it."""
        return f"{self.url}/{name}"

    @abstractmethod
    def absence(self) -> str:
        """Why there is no store here and what to do, to be said after the url."""

    # Control files

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """The names in a folder of control files; empty when there is no such folder."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A control file. Raises FileNotFoundError when there is none."""

    @abstractmethod
    def version(self, name: str) -> Hashable | None:
        """What changes whenever another file gets this name; None when that is not known.

        Raises:
            FileNotFoundError: If there is no such file.
        """

    # Shards

    @abstractmethod
    def open_shard(self, ref: FileRef) -> int:
        """A descriptor, to be closed by the caller, of a plain file of this machine that holds the shard.

        Raises:
            MissingShardError: If there is no such file.
            CorruptionError: If its size is not the promised one.
            ManifestError: If a symbolic link stands in its path.
        """

    @abstractmethod
    def local_file(self, ref: FileRef) -> Path:
        """A path of this machine under which Parquet and DuckDB can open a shard; errors as `open_shard`."""

    def prefetch(self, refs: Iterable[FileRef]) -> None:
        """Bring shards to this machine, several at once, if that is what reading them takes."""
        del refs

    def map(self, ref: FileRef) -> tuple[np.ndarray, Hashable]:
        """Map a whole shard read-only; uint8 (bytes,), and what tells the file from any other."""
        fd = self.open_shard(ref)
        try:
            return map_descriptor(fd, 0, ref.bytes, self.place(ref.path)), file_identity(fd)
        finally:
            os.close(fd)

    def map_private(self, ref: FileRef, identity: Hashable, start: int, stop: int) -> np.ndarray:
        """Map bytes start:stop of a shard that `map` has mapped copy-on-write; uint8 (stop - start,).

        Each call is a map of its own: what is written to it is seen by nobody else and reaches no file.

        Raises:
            CorruptionError: If there is another file by now.
        """
        fd = self.open_shard(ref)
        try:
            if file_identity(fd) != identity:
                raise CorruptionError(
                    f"{self.place(ref.path)}: the shard was replaced while it was in use; "
                    "open the store again"
                )
            return map_descriptor(fd, start, stop, self.place(ref.path), private=True)
        finally:
            os.close(fd)

    def confirm(self, ref: FileRef, identity: Hashable) -> None:
        """Compare the size of a mapped shard again, if that is cheap, before more of its pages are touched.

        Raises:
            CorruptionError: If its file was cut meanwhile, so that touching them may be a SIGBUS.
        """
        del ref, identity

    def current_identity(self, ref: FileRef) -> Hashable | None:
        """What `map` would tell of the file that has the name now; None when a glance cannot tell."""
        return None

    def must_release(self) -> bool:
        """Whether shards were downloaded since the last call, so that others may have been evicted."""
        return False

    def evicted(self, refs: Iterable[FileRef]) -> list[FileRef]:
        """Those of some mapped shards whose place on the disk would be free if they were unmapped."""
        del refs
        return []

    # Snapshots in use

    @abstractmethod
    def hold(self, name: str) -> Lease:
        """Keep a control file from `remove_unless_held`. Raises FileNotFoundError when it is gone."""

    # Writing

    @abstractmethod
    def prepare(self, folders: Iterable[str]) -> None:
        """Make the folders of a new store.

        Raises:
            StoreExistsError: If there are files that are not of a store.
        """

    @abstractmethod
    def create(self, name: str, content: bytes) -> bool:
        """Give `content` a name, durably and all at once; False when the name is already taken."""

    def hint_newest(self, snapshot_id: int) -> None:
        """Leave the number of the newest snapshot for readers that cannot list the folder. Never fails."""
        del snapshot_id

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file. Raises FileNotFoundError when there is none."""

    @abstractmethod
    def remove_unless_held(self, name: str, is_kept: Callable[[], bool]) -> bool:
        """Remove a control file that nobody holds and that is not kept; whether it was removed.

        `is_kept` is asked when nobody can begin to hold the file any more.
        """

    @abstractmethod
    def open_workspace(self, writer: str) -> Workspace:
        """Make the staging folder of a writer, by whose name `watch_writers` knows it."""

    @abstractmethod
    def reopen_workspace(self, writer: str) -> Workspace | None:
        """The staging folder of a writer that left it, or a new one; None while somebody is at work there."""

    @abstractmethod
    def install(self, source: Path, name: str) -> None:
        """Move a finished file of a workspace to its name. Its content is durable then, the name is not."""

    @abstractmethod
    def flush(self, names: Iterable[str]) -> None:
        """Make durable what was installed under these names, or removed."""

    # Collecting garbage

    @abstractmethod
    def exclude_collection(self) -> AbstractContextManager[None]:
        """The one lock of gc while it removes, and of those who publish files that gc may find old. Waits."""

    @abstractmethod
    def walk(self, folder: str) -> Iterator[StoredFile]:
        """All files under a folder."""

    @abstractmethod
    def watch_writers(self) -> AbstractContextManager[set[str]]:
        """The writers at work on this machine. Nobody comes back to a folder before the block ends."""

    @abstractmethod
    def commit_folders(self, before: float) -> list[str]:
        """Folders that single commits made and that last changed before a moment."""

    @abstractmethod
    def remove_empty_folder(self, name: str) -> None:
        """Remove the folder of a commit if there is no file in it."""
