"""A store in a folder of this machine, or in one that machines share."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from storage.backends.base import NEWEST, StoredFile, Workspace
from storage.backends.local_folder import LocalFolder
from storage.backends.network import network_file_system
from storage.backends.workspaces import Workspaces
from storage.disk import write_errors
from storage.errors import (
    StorageError,
    StoreExistsError,
)
from storage.files import fsync_directory, fsync_file, publish_exclusively

__all__ = ["LocalBackend"]

ALLOW_NETWORK_FS = "UNIRL_ALLOW_NETWORK_FS"
_FOLDERS_OF_COMMITS = ("blobs", "staging")


class LocalBackend(LocalFolder):
    """A folder of this machine, or one that machines share."""

    def __init__(self, path: str | Path, *, allow_network_fs: bool | None = None) -> None:
        """
        Args:
            path: The folder.
            allow_network_fs: Write although the folder is on a network file system; None asks the
                environment variable UNIRL_ALLOW_NETWORK_FS.
        """
        super().__init__(path)
        self._allow_network_fs = allow_network_fs
        self._is_on_network: bool | None = None
        self._workspaces = Workspaces(self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(LocalBackend, allow_network_fs=self._allow_network_fs), (self.path,)

    def prepare(self, folders: Iterable[str]) -> None:
        self._check_writable()
        if self.path.exists():
            if not self.path.is_dir():
                raise StoreExistsError(f"{self.path}: there is a file of this name; give another path")
            foreign = sorted({entry.name for entry in self.path.iterdir()} - {*folders, NEWEST})
            if foreign:
                raise StoreExistsError(
                    f"{self.path}: the folder holds other files ({foreign[0]}); give an empty or new folder"
                )
        with self._write_errors():
            for folder in folders:
                (self.path / folder).mkdir(parents=True, exist_ok=True)
            fsync_directory(self.path)
            fsync_directory(self.path.parent)

    def create(self, name: str, content: bytes) -> bool:
        self._check_writable()
        target = self.path / name
        staging = self.path / "staging"
        while True:
            temporary = staging / f"{target.parent.name}-{secrets.token_hex(8)}.json"
            with self._write_errors(), suppress(FileNotFoundError):  # gc removed it before it got its name.
                for folder in (target.parent, staging):
                    self._make_folder(folder)
                return publish_exclusively(target, content, temporary)

    def hint_newest(self, snapshot_id: int) -> None:
        temporary = self.path / "staging" / f"newest-{secrets.token_hex(8)}"
        with suppress(OSError):
            temporary.write_text(f"{snapshot_id}\n")
            temporary.replace(self.path / NEWEST)

    def remove(self, name: str) -> None:
        path = self.path / name
        if not os.path.lexists(path):
            raise FileNotFoundError(name)
        with self._write_errors():
            path.unlink(missing_ok=True)

    def remove_unless_held(self, name: str, is_kept: Callable[[], bool]) -> bool:
        path = self.path / name
        with suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            if not is_kept():
                with self._write_errors():
                    path.unlink()
                return True
        return False

    def open_workspace(self, writer: str) -> Workspace:
        workspace = self._workspace(writer, has_scratch=self._check_writable())
        if workspace is None:
            raise StorageError(f"{self.path}: another writer has the name {writer}; begin a new commit")
        return workspace

    def reopen_workspace(self, writer: str) -> Workspace | None:
        """In the store itself even on a network: only so another machine can go on with what was left."""
        self._check_writable()
        return self._workspace(writer, has_scratch=False)

    def _workspace(self, writer: str, *, has_scratch: bool) -> Workspace | None:
        with self._write_errors():
            return self._workspaces.open(writer, has_scratch=has_scratch)

    def _check_writable(self) -> bool:
        """Whether the store is on a network file system, on which writing has to be allowed."""
        if self._is_on_network is None:
            kind = network_file_system(self.path)
            allowed = self._allow_network_fs
            if allowed is None:
                allowed = os.environ.get(ALLOW_NETWORK_FS, "") not in ("", "0")
            if kind is not None and not allowed:
                raise StorageError(
                    f"{self.path}: the folder is on a network file system ({kind}), where locks of other "
                    "machines may not be seen and gc has only its grace period to spare their commits. To "
                    f"write there, open the store with allow_network_fs=True or set {ALLOW_NETWORK_FS}=1; or "
                    "write to a local disk and copy the finished store"
                )
            self._is_on_network = kind is not None
        return self._is_on_network

    def install(self, source: Path, name: str) -> None:
        target = self.path / name
        with self._write_errors():
            if os.path.realpath(target.parent) != str(Path(self.identity, name).parent):
                raise StorageError(
                    f"{target.parent}: a symbolic link stands in the path, and shards behind links are not "
                    "read; mount the disk there, or move the whole store"
                )
            self._make_folder(target.parent)
            source = self._workspaces.bring(source)
            fsync_file(source)
            source.rename(target)

    def flush(self, names: Iterable[str]) -> None:
        with self._write_errors():
            for folder in {(self.path / name).parent for name in names}:
                fsync_directory(folder)

    def _write_errors(self) -> AbstractContextManager[None]:
        return write_errors(self.path / "staging")

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            fsync_directory(folder.parent)

    # Collecting garbage

    @contextmanager
    def exclude_collection(self) -> Iterator[None]:
        """A lock on a folder, which a kill releases. Network folders may not have it."""
        self._check_writable()
        with self._write_errors():
            fd = os.open(self.path / "snapshots", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def walk(self, folder: str) -> Iterator[StoredFile]:
        # Not rglob, which fails when another writer withdraws a folder at this moment.
        for place, folders, files in os.walk(self.path / folder):
            for entry in (*folders, *files):
                path = Path(place, entry)
                with suppress(FileNotFoundError):
                    status = path.lstat()
                    if not stat.S_ISDIR(status.st_mode):
                        name = path.relative_to(self.path).as_posix()
                        yield StoredFile(path=name, bytes=status.st_size, changed=status.st_ctime)

    def watch_writers(self) -> AbstractContextManager[set[str]]:
        return self._workspaces.watch()

    def commit_folders(self, before: float) -> list[str]:
        found = []
        for top in _FOLDERS_OF_COMMITS:
            for path in (self.path / top).glob("*"):
                with suppress(FileNotFoundError):
                    if path.is_dir() and path.lstat().st_ctime < before:
                        found.append(path.relative_to(self.path).as_posix())
        return found

    def remove_empty_folder(self, name: str) -> None:
        """Folders are removed one by one from below, so that what a writer puts there meanwhile stays."""
        for place, _, _ in os.walk(self.path / name, topdown=False):
            with suppress(OSError):
                Path(place).rmdir()
