"""A store in the memory of one process, for tests and for stores that are thrown away.

Shards are anonymous files, so that maps, DuckDB and Parquet work as on a disk. Each takes a file descriptor.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage.backends.base import Backend, Lease, StoredFile, Workspace
from storage.errors import CorruptionError, MissingShardError, StorageError
from storage.fork_locks import new_lock
from storage.manifest import FileRef

__all__ = ["MemoryBackend"]


class _Shard:
    """An anonymous file, which goes with the last descriptor and the last map."""

    def __init__(self, source: Path) -> None:
        try:
            self.fd = os.memfd_create(source.name, os.MFD_CLOEXEC)
        except OSError as error:
            raise StorageError(
                f"{source.name}: no memory or descriptor for another shard: {error.strerror}; compact the "
                "store, or keep it in a folder"
            ) from error
        weakref.finalize(self, os.close, self.fd)
        with source.open("rb") as file, open(self.fd, "wb", closefd=False) as target:
            shutil.copyfileobj(file, target, 1 << 22)
        self.bytes = os.fstat(self.fd).st_size
        self.changed = time.time()

    @property
    def path(self) -> Path:
        return Path(f"/proc/self/fd/{self.fd}")


class _Control:
    """A control file."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.changed = time.time()
        self.version = next(_versions)

    @property
    def bytes(self) -> int:
        return len(self.content)


class _Files:
    """What one name stands for in this process."""

    def __init__(self) -> None:
        self.lock = new_lock(self, "lock")
        self.collection = new_lock(self, "collection")
        self.by_name: dict[str, _Control | _Shard] = {}
        self.held: dict[str, set[object]] = {}
        self.writers: set[str] = set()
        self.number = next(_versions)


_versions = itertools.count()
_stores: weakref.WeakValueDictionary[str, _Files] = weakref.WeakValueDictionary()
_stores_lock = new_lock(sys.modules[__name__], "_stores_lock")


class MemoryBackend(Backend):
    """The store of a name. It lives as long as a backend or a store handle of this process looks at it.

    A forked child sees what there was at the fork, and what it writes is seen by nobody else. A process that
    was spawned sees nothing.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = f"MemoryBackend({name!r})"
        self.read_only = False
        with _stores_lock:
            self._files = _stores.setdefault(name, _Files())
        self.identity = f"memory {self._files.number}"

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryBackend, (self.name,)

    def absence(self) -> str:
        return "this process has no store of this name; create one with FeatureStore.create"

    # Control files

    def names(self, folder: str) -> list[str]:
        names = [name.rpartition("/") for name in list(self._files.by_name)]
        return [name for parent, _, name in names if parent == folder]

    def read(self, name: str) -> bytes:
        return self._control(name).content

    def version(self, name: str) -> Hashable:
        return self._control(name).version

    def _control(self, name: str) -> _Control:
        file = self._files.by_name.get(name)
        if not isinstance(file, _Control):
            raise FileNotFoundError(name)
        return file

    # Shards

    def open_shard(self, ref: FileRef) -> int:
        return os.open(self.local_file(ref), os.O_RDONLY | os.O_CLOEXEC)

    def local_file(self, ref: FileRef) -> Path:
        shard = self._files.by_name.get(ref.path)
        if not isinstance(shard, _Shard):
            raise MissingShardError(
                f"{self.place(ref.path)}: the shard is missing; open an earlier snapshot that does not "
                "need it"
            )
        if shard.bytes != ref.bytes:
            raise CorruptionError(
                f"{self.place(ref.path)}: the shard has {shard.bytes} bytes, the snapshot says {ref.bytes}; "
                "write it again"
            )
        return shard.path

    # Snapshots in use

    def hold(self, name: str) -> Lease:
        files = self._files
        holder = object()
        with files.lock:
            self._control(name)
            held = files.held.setdefault(name, set())
            held.add(holder)
        # Without the lock, since the garbage collector may run this at any place.
        return Lease(lambda: held.discard(holder))

    # Writing

    def prepare(self, folders: Iterable[str]) -> None:
        del folders

    def create(self, name: str, content: bytes) -> bool:
        control = _Control(content)
        with self._files.lock:
            return self._files.by_name.setdefault(name, control) is control

    def remove(self, name: str) -> None:
        if self._files.by_name.pop(name, None) is None:
            raise FileNotFoundError(name)

    def remove_unless_held(self, name: str, is_kept: Callable[[], bool]) -> bool:
        with self._files.lock:
            if self._files.held.get(name) or is_kept():
                return False
            return self._files.by_name.pop(name, None) is not None

    def open_workspace(self, writer: str) -> Workspace:
        path = Path(tempfile.mkdtemp(prefix=f"store-{writer}-"))
        self._files.writers.add(writer)

        def close() -> None:
            shutil.rmtree(path, ignore_errors=True)
            self._files.writers.discard(writer)

        return Workspace(path=path, close=close, leave=close)

    def reopen_workspace(self, writer: str) -> Workspace | None:
        """A new folder in any case: what lives in memory leaves no work behind."""
        with self._files.lock:
            return None if writer in self._files.writers else self.open_workspace(writer)

    def install(self, source: Path, name: str) -> None:
        shard = _Shard(source)
        source.unlink()
        with self._files.lock:
            self._files.by_name[name] = shard

    def flush(self, names: Iterable[str]) -> None:
        del names

    # Collecting garbage

    @contextmanager
    def exclude_collection(self) -> Iterator[None]:
        with self._files.collection:
            yield

    def walk(self, folder: str) -> Iterator[StoredFile]:
        with self._files.lock:
            found = list(self._files.by_name.items())
        for name, file in found:
            if name.startswith(f"{folder}/"):
                yield StoredFile(path=name, bytes=file.bytes, changed=file.changed)

    @contextmanager
    def watch_writers(self) -> Iterator[set[str]]:
        yield set(self._files.writers)

    def commit_folders(self, before: float) -> list[str]:
        return []

    def remove_empty_folder(self, name: str) -> None:
        del name
