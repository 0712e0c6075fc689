"""Reading from fsspec file systems: what is transient is tried again, and no error shows a password."""

from __future__ import annotations

import errno
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from storage.errors import CorruptionError, StorageError
from storage.fork_locks import new_lock

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["RemoteFolder"]

Result = TypeVar("Result")

_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.1
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WORTH_ANOTHER_TRY = (408, 425, 429)
# Errors of libraries that fsspec may use and that are no OSError; one that is not loaded raises none.
_FOREIGN_ERRORS = {
    "aiohttp": ("ClientError",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("HttpError",),
    "azure.core.exceptions": ("AzureError",),
}


class RemoteFolder:
    """A folder of a file system that fsspec opens. May be used by several threads, and after a fork.

    url: without user and password, for errors.
    """

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        parts = urlsplit(url)
        if parts.query or parts.fragment:
            raise StorageError(
                f"{_shown(url)}: the URL of a store has no query; give credentials as storage_options"
            )
        self.url = _shown(url).rstrip("/")
        self.is_web = parts.scheme in ("http", "https")
        self._opening = (url.rstrip("/"), options)
        self._lock = new_lock(self, "_lock")
        self._opened: tuple[int, AbstractFileSystem, str] | None = None

    def names(self, folder: str) -> list[str]:
        """The names in a folder; empty when there is none. Raises as `read`."""

        def names(fs: AbstractFileSystem, path: str) -> list[str]:
            fs.invalidate_cache()
            return [name.rstrip("/").rpartition("/")[2] for name in fs.ls(path, detail=False)]

        try:
            return self._try(folder, names)
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes:
        """A whole small file.

        Raises:
            FileNotFoundError: If there is none.
            PermissionError: If the server refuses it.
            StorageError: If it cannot be read after some tries.
        """
        return bytes(self._try(name, lambda fs, path: fs.cat_file(path)))

    def download(self, name: str, target: Path, num_bytes: int) -> None:
        """Copy a file that should have so many bytes to this machine. Raises as `read`.

        Raises:
            CorruptionError: If the server sends more.
        """

        def download(fs: AbstractFileSystem, path: str) -> None:
            fs.get_file(path, str(target), callback=_limit(f"{self.url}/{name}", num_bytes))

        self._try(name, download)

    def _try(self, name: str, action: Callable[[AbstractFileSystem, str], Result]) -> Result:
        place = f"{self.url}/{name}"
        pause = _FIRST_PAUSE_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                fs, root = self._filesystem()
                return action(fs, f"{root}/{name}")
            except StorageError:
                raise
            except (FileNotFoundError, NotADirectoryError):
                raise FileNotFoundError(place) from None
            except _transient_errors() as error:
                if isinstance(error, PermissionError) or _is_refusal(error):
                    raise PermissionError(f"{place}: the server refuses it: {error}") from error
                if getattr(error, "errno", None) in _FULL:
                    raise
                if attempt == _ATTEMPTS:
                    raise StorageError(
                        f"{place}: it cannot be read after {attempt} tries: {error!r}; check the network and "
                        "the server"
                    ) from error
            time.sleep(pause * random.SystemRandom().uniform(0.5, 1))
            pause *= 2
        raise AssertionError

    def _filesystem(self) -> tuple[AbstractFileSystem, str]:
        """The file system and the folder's path in it; a forked child opens its own."""
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                url, options = self._opening
                self._opened = (os.getpid(), *_open(url, options))
            return self._opened[1:]


def _open(url: str, options: dict[str, Any]) -> tuple[AbstractFileSystem, str]:
    from fsspec.core import url_to_fs

    try:
        fs, path = url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise StorageError(f"{_shown(url)}: the URL cannot be opened: {error}") from error
    return fs, path.rstrip("/")


def _limit(place: str, num_bytes: int) -> Any:
    """What counts the bytes of a download, so that no server fills the disk."""
    from fsspec.callbacks import Callback

    class Limit(Callback):
        def relative_update(self, inc: int = 1) -> None:
            super().relative_update(inc)
            if self.value > num_bytes:
                raise CorruptionError(
                    f"{place}: the server sends more than the {num_bytes} bytes of the snapshot; copy the "
                    "shard there again"
                )

    return Limit()


def _is_refusal(error: Exception) -> bool:
    """Whether the server found something wrong with the request, so that it would be answered alike again."""
    status = getattr(error, "status", None)
    return isinstance(status, int) and 400 <= status < 500 and status not in _WORTH_ANOTHER_TRY


def _transient_errors() -> tuple[type[Exception], ...]:
    loaded = [(sys.modules[name], kinds) for name, kinds in _FOREIGN_ERRORS.items() if name in sys.modules]
    return (OSError, *(getattr(module, kind) for module, kinds in loaded for kind in kinds))


def _shown(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
