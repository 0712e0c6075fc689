"""Shards of remote stores on the disk of this machine: checked, bounded in size, shared by all processes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from storage.backends.cache_folder import CACHE, CACHE_BYTES, CacheFolder
from storage.backends.folder_locks import lock_folder
from storage.errors import StorageError, StorageFullError
from storage.files import fsync_file
from storage.fork_locks import new_lock
from storage.manifest import FileRef

__all__ = ["DEFAULT_CACHE_BYTES", "ShardCache"]

DEFAULT_CACHE_BYTES = 64 << 30


class ShardCache:
    """A folder of downloaded shards. Processes that give the same folder share it.

    folder: where it lies; by default the environment variable UNIRL_CACHE, else unirl/shards in
        XDG_CACHE_HOME or ~/.cache.
    max_bytes: what its shards may take together; by default UNIRL_CACHE_BYTES, else 64 GiB. The shards that
        were not asked for longest go first. Those that a process still has mapped or opened take their place
        on the disk until it lets go.
    """

    def __init__(self, folder: str | Path | None = None, *, max_bytes: int | None = None) -> None:
        self.folder = Path(folder or os.environ.get(CACHE) or _default_folder()).absolute()
        self.max_bytes = _max_bytes_setting() if max_bytes is None else max_bytes
        self._folder = CacheFolder(self.folder, self.max_bytes)
        self._session: _Session | None = None
        self._session_lock = new_lock(self, "_session_lock")

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ShardCache, max_bytes=self.max_bytes), (self.folder,)

    def open(self, url: str, ref: FileRef, fetch: Callable[[Path], None]) -> int:
        """A descriptor of a shard of the store at `url`, downloaded if it is not held. The caller closes it.

        Args:
            url: Of the store.
            ref: The shard.
            fetch: Writes the shard to a path and compares it; called by one thread of one process of the
                machine at a time, if at all.

        Raises:
            StorageError: If the shard is larger than the cache may be, or the folder cannot be written to.
            StorageFullError: If the disk of the cache is full.
        """
        name = _name(url, ref)
        fd = self._open_held(name, ref)
        if fd is not None:
            return fd
        try:
            with self._folder.locked(name[:2]):
                fd = self._open_held(name, ref)
                return self._download(name, ref, fetch) if fd is None else fd
        except StorageError:
            raise
        except OSError as error:
            raise self.failure(error) from error

    def failure(self, error: OSError) -> StorageError:
        """What to say when the system refuses something that the cache does."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return StorageFullError(
                f"{self.folder}: the disk of the shard cache is full; make room, or give the cache another "
                f"folder ({CACHE})"
            )
        return StorageError(
            f"{self.folder}: the shard cache cannot be used: {error}; give it another folder ({CACHE})"
        )

    def path(self, url: str, ref: FileRef, fetch: Callable[[Path], None]) -> Path:
        """A path of a shard that stays good while this process lives, even if the cache lets the shard go."""
        with self._session_lock:
            if self._session is None or self._session.pid != os.getpid():
                self._session = _Session(self.folder / "open")
            session = self._session
        target = session.folder / _name(url, ref)
        while not target.exists():
            fd = self.open(url, ref, fetch)
            try:
                # By its descriptor, since the name may stand for another file by now; if there is no name
                # left it is downloaded again. Only with a folder given does Python follow the link.
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    os.link(f"/proc/self/fd/{fd}", target, src_dir_fd=fd, follow_symlinks=True)
            finally:
                os.close(fd)
        return target

    def holds(self, url: str, ref: FileRef) -> bool:
        """Whether a shard is held at this moment."""
        return (self.folder / "shards" / _name(url, ref)).exists()

    def _open_held(self, name: str, ref: FileRef) -> int | None:
        try:
            fd = os.open(self.folder / "shards" / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if os.fstat(fd).st_size == ref.bytes:
            with contextlib.suppress(PermissionError):
                os.utime(fd)
            return fd
        os.close(fd)
        return None

    def _download(self, name: str, ref: FileRef, fetch: Callable[[Path], None]) -> int:
        incoming = self.folder / "incoming" / name
        room = incoming.with_name(f"{name}.room")
        try:
            self._folder.make_room(room, ref)
            fetch(incoming)
            fsync_file(incoming)
            fd = os.open(incoming, os.O_RDONLY | os.O_CLOEXEC)
            incoming.replace(self.folder / "shards" / name)
            return fd
        finally:
            incoming.unlink(missing_ok=True)
            room.unlink(missing_ok=True)


class _Session:
    """The folder of one process under open/, locked while the process lives."""

    def __init__(self, parent: Path) -> None:
        self.pid = os.getpid()
        self.folder = parent / f"{self.pid}-{secrets.token_hex(4)}"
        lock = lock_folder(self.folder)
        assert lock is not None
        weakref.finalize(self, _end_session, self.pid, self.folder, lock)


def _end_session(pid: int, folder: Path, lock: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _name(url: str, ref: FileRef) -> str:
    """The name of a shard in the cache. It says whose it is: no store can put a shard before another's."""
    place = hashlib.blake2b(f"{url}\n{ref.path}".encode(), digest_size=12).hexdigest()
    return f"{place}-{ref.xxh3}"


def _default_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "unirl" / "shards"


def _max_bytes_setting() -> int:
    text = os.environ.get(CACHE_BYTES)
    if text is None:
        return DEFAULT_CACHE_BYTES
    if not text.isdecimal():
        raise StorageError(f"{CACHE_BYTES}={text!r} is not a number of bytes, such as {DEFAULT_CACHE_BYTES}")
    return int(text)
