"""A store behind a URL, for reading: its shards are downloaded whole, once per machine, when needed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from storage.backends.base import NEWEST, Lease
from storage.backends.read_only import ReadOnlyBackend
from storage.backends.shard_cache import ShardCache
from storage.backends.transfer import RemoteFolder
from storage.errors import CorruptionError, MissingShardError, StorageError
from storage.files import hash_file, map_descriptor
from storage.manifest import FileRef

__all__ = ["RemoteBackend"]

_DOWNLOADS_AT_ONCE = 8
_DOWNLOADS_OF_A_SHARD = 2
T = TypeVar("T")


class RemoteBackend(ReadOnlyBackend):
    """A store at any URL that fsspec knows, read through a cache of its shards.

    Snapshots and tags are read anew each time. A web server (http, https) need not list its folders: there
    the newest snapshot is found from the hint that writers leave, and from the numbers after it.
    """

    evicts = True

    def __init__(
        self,
        url: str,
        cache: ShardCache | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            url: Of the store's folder, such as s3://bucket/store.
            cache: Where shards are kept; by default a `ShardCache()`.
            storage_options: For the file system, such as credentials. They are pickled with the store.
        """
        options = dict(storage_options or {})
        self._folder = RemoteFolder(url, options)
        self._arguments = (url, options)
        self.cache = ShardCache() if cache is None else cache
        self._has_downloaded = False
        self.url = self._folder.url
        self.identity = f"{self.url} in {self.cache.folder}"

    def __reduce__(self) -> tuple[Any, ...]:
        url, options = self._arguments
        return partial(RemoteBackend, storage_options=options), (url, self.cache)

    def absence(self) -> str:
        if self._folder.is_web:
            return (
                f"there is no feature store, or the server lists no folders and has no file {NEWEST}; give "
                "the number of a snapshot, or commit once with this version"
            )
        return "there is no feature store (no snapshots/ in it); check the URL"

    # Control files

    def names(self, folder: str) -> list[str]:
        if not self._folder.is_web:
            return self._readable(lambda: self._folder.names(folder))
        listed: list[str] = []
        with contextlib.suppress(PermissionError):
            listed = self._folder.names(folder)
        return listed if folder != "snapshots" else [*{*listed, *self._snapshots_from_hint()}]

    def _snapshots_from_hint(self) -> Iterator[str]:
        """The snapshot that the hint names and those after it; gc removes none of them without a new hint."""
        with contextlib.suppress(FileNotFoundError, PermissionError, ValueError):
            number = int(self._folder.read(NEWEST))
            while True:
                name = f"{number:08d}.json"
                content = self._folder.read(f"snapshots/{name}")
                yield name
                if not _is_snapshot(content, number):
                    return  # A server may answer every request with some page.
                number += 1

    def read(self, name: str) -> bytes:
        return self._readable(lambda: self._folder.read(name))

    def _readable(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except PermissionError as error:
            raise StorageError(f"{error}; give credentials as storage_options") from error

    def version(self, name: str) -> Hashable | None:
        del name
        return None

    # Shards

    def open_shard(self, ref: FileRef) -> int:
        return self.cache.open(self.url, ref, partial(self._fetch, ref))

    def local_file(self, ref: FileRef) -> Path:
        return self.cache.path(self.url, ref, partial(self._fetch, ref))

    def map_private(self, ref: FileRef, identity: Hashable, start: int, stop: int) -> np.ndarray:
        """As for any backend, but another file is as good: the cache holds none whose checksum differs."""
        del identity
        fd = self.open_shard(ref)
        try:
            return map_descriptor(fd, start, stop, self.place(ref.path), private=True)
        finally:
            os.close(fd)

    def must_release(self) -> bool:
        downloaded, self._has_downloaded = self._has_downloaded, False
        return downloaded

    def evicted(self, refs: Iterable[FileRef]) -> list[FileRef]:
        return [ref for ref in refs if not self.cache.holds(self.url, ref)]

    def prefetch(self, refs: Iterable[FileRef]) -> None:
        missing = [ref for ref in refs if not self.cache.holds(self.url, ref)]
        if len(missing) < 2:
            return
        with ThreadPoolExecutor(min(_DOWNLOADS_AT_ONCE, len(missing)), "store-prefetch") as pool:
            for fd in pool.map(self.open_shard, missing):
                os.close(fd)

    def _fetch(self, ref: FileRef, target: Path) -> None:
        """Download a shard and compare it. One that differs may have been damaged on the way: once more."""
        place = self.place(ref.path)
        self._has_downloaded = True
        for _ in range(_DOWNLOADS_OF_A_SHARD):
            try:
                self._readable(lambda: self._folder.download(ref.path, target, ref.bytes))
            except FileNotFoundError:
                raise MissingShardError(
                    f"{place}: the shard is missing; copy it there, or open an earlier snapshot that does "
                    "not need it"
                ) from None
            found = target.stat().st_size
            if found != ref.bytes:
                text = f"{place}: the shard has {found} bytes, the snapshot says {ref.bytes}"
                continue
            checksum = hash_file(target)
            if checksum == ref.xxh3:
                return
            text = f"{place}: the checksum of the shard is {checksum}, the snapshot says {ref.xxh3}"
        raise CorruptionError(f"{text}; copy the shard there again")

    # Snapshots in use

    def hold(self, name: str) -> Lease:
        """Nothing: gc of the store does not see who reads over a network. A tag keeps a snapshot."""
        del name
        return Lease(lambda: None)

    # Writing

    def refuse(self) -> NoReturn:
        raise StorageError(
            f"{self.url}: a store behind a URL can only be read; write to a folder and copy that, or mount "
            "the place and open its path"
        )


def _is_snapshot(content: bytes, number: int) -> bool:
    try:
        return bool(json.loads(content)["id"] == number)
    except (ValueError, LookupError, TypeError, RecursionError):
        return False
