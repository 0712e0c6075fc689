"""A store in a folder of this machine, or in one that machines share."""

from __future__ import annotations

import difflib
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.backends.base import Backend, Lease, StoredFile, Workspace
from storage.errors import (
    CorruptionError,
    ManifestError,
    MissingShardError,
    StorageError,
    StoreExistsError,
)
from storage.files import fsync_directory, fsync_file, publish_exclusively
from storage.manifest import FileRef

__all__ = ["LocalBackend"]

_LOCK_NAME = "writer.lock"
_FOLDERS_OF_COMMITS = ("blobs", "staging")


class LocalBackend(Backend):
    """A folder. path: as given, made absolute."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.url = str(self.path)
        self.identity = os.path.realpath(self.path)
        self.read_only = False

    def absence(self) -> str:
        reason = (
            "this is not a feature store (no snapshots/ in it)"
            if self.path.exists()
            else "there is no such folder"
        )
        near = difflib.get_close_matches(self.path.name, _stores_in(self.path.parent), n=1, cutoff=0.5)
        hint = (
            f"did you mean {self.path.parent / near[0]}?"
            if near
            else "create one with FeatureStore.create or unirl ingest"
        )
        return f"{reason}; {hint}"

    # Control files

    def names(self, folder: str) -> list[str]:
        path = self.path / folder
        return [entry.name for entry in path.iterdir()] if path.is_dir() else []

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def version(self, name: str) -> Hashable:
        status = (self.path / name).stat()
        return status.st_ino, status.st_size, status.st_mtime_ns

    # Shards

    def open_shard(self, ref: FileRef) -> int:
        path = self._path_of(ref)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise MissingShardError(
                f"{path}: the shard is missing; copy it back, or open an earlier snapshot that does not "
                "need it"
            ) from None
        except OSError as error:
            raise StorageError(f"{path}: the shard cannot be opened: {error.strerror}") from error
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != ref.bytes:
            os.close(fd)
            raise CorruptionError(
                f"{path}: the shard has {found.st_size} bytes, the snapshot says {ref.bytes}; copy it "
                "back from a backup"
            )
        return fd

    def _path_of(self, ref: FileRef) -> Path:
        path = Path(self.identity, ref.path)
        if os.path.realpath(path) != str(path):
            raise ManifestError(
                f"{path}: a symbolic link stands in the path of a shard; replace it by the file itself"
            )
        return path

    def local_file(self, ref: FileRef) -> Path:
        os.close(self.open_shard(ref))
        return Path(self.identity, ref.path)

    # Snapshots in use

    def hold(self, name: str) -> Lease:
        """A shared lock on the file, which a kill releases. Not every network folder shows it elsewhere."""
        fd = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise FileNotFoundError(name) from None
        except OSError:
            return Lease(lambda: os.close(fd))
        if os.fstat(fd).st_nlink == 0:
            os.close(fd)
            raise FileNotFoundError(name)
        return Lease(lambda: os.close(fd))

    # Writing

    def prepare(self, folders: Iterable[str]) -> None:
        if self.path.exists():
            if not self.path.is_dir():
                raise StoreExistsError(f"{self.path}: there is a file of this name; give another path")
            foreign = sorted({entry.name for entry in self.path.iterdir()} - set(folders))
            if foreign:
                raise StoreExistsError(
                    f"{self.path}: the folder holds other files ({foreign[0]}); give an empty or new folder"
                )
        for folder in folders:
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        fsync_directory(self.path)
        fsync_directory(self.path.parent)

    def create(self, name: str, content: bytes) -> bool:
        target = self.path / name
        staging = self.path / "staging"
        for folder in (target.parent, staging):
            self._make_folder(folder)
        temporary = staging / f"{target.parent.name}-{secrets.token_hex(8)}.json"
        return publish_exclusively(target, content, temporary)

    def remove(self, name: str) -> None:
        (self.path / name).unlink()

    def remove_unless_held(self, name: str, is_kept: Callable[[], bool]) -> bool:
        path = self.path / name
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            if is_kept():
                return False
            path.unlink(missing_ok=True)
            return True

    def open_workspace(self, writer: str) -> Workspace:
        path = self.path / "staging" / writer
        self._make_workspace(path, exist_ok=False)
        workspace = self._lock_workspace(path)
        if workspace is None:
            raise StorageError(f"{path}: gc took the folder of a new commit for an old one; commit again")
        return workspace

    def reopen_workspace(self, writer: str) -> Workspace | None:
        path = self.path / "staging" / writer
        self._make_workspace(path, exist_ok=True)
        return self._lock_workspace(path)

    def _make_workspace(self, path: Path, exist_ok: bool) -> None:
        try:
            path.mkdir(parents=True, exist_ok=exist_ok)
        except OSError as error:
            raise StorageError(f"{self.path}: the store cannot be written to: {error.strerror}") from error

    def _lock_workspace(self, path: Path) -> Workspace | None:
        lock = (path / _LOCK_NAME).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None

        def close() -> None:
            shutil.rmtree(path, ignore_errors=True)
            lock.close()

        return Workspace(path=path, close=close, leave=lock.close)

    def install(self, source: Path, name: str) -> None:
        fsync_file(source)
        target = self.path / name
        self._make_folder(target.parent)
        source.rename(target)

    def flush(self, names: Iterable[str]) -> None:
        for folder in {(self.path / name).parent for name in names}:
            fsync_directory(folder)

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            fsync_directory(folder.parent)

    # Collecting garbage

    @contextmanager
    def exclude_collection(self) -> Iterator[None]:
        """A lock on a folder, which a kill releases. Network folders may not have it."""
        fd = os.open(self.path / "snapshots", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def walk(self, folder: str) -> Iterator[StoredFile]:
        for path in (self.path / folder).rglob("*"):
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if not stat.S_ISDIR(status.st_mode):
                name = path.relative_to(self.path).as_posix()
                yield StoredFile(path=name, bytes=status.st_size, changed=status.st_ctime)

    def live_writers(self) -> set[str]:
        folders = (self.path / "staging").glob("*")
        return {path.name for path in folders if path.is_dir() and not _is_abandoned(path)}

    def commit_folders(self, before: float) -> list[str]:
        return [
            path.relative_to(self.path).as_posix()
            for top in _FOLDERS_OF_COMMITS
            for path in (self.path / top).glob("*")
            if path.is_dir() and path.stat().st_ctime < before
        ]

    def remove_empty_folder(self, name: str) -> None:
        folder = self.path / name
        if not any(path.is_file() for path in folder.rglob("*")):
            shutil.rmtree(folder)


def _is_abandoned(folder: Path) -> bool:
    """Whether the writer of a staging folder is gone. Locks are seen on one machine only."""
    try:
        with (folder / _LOCK_NAME).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


def _stores_in(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return [entry.name for entry in folder.iterdir() if any((entry / "snapshots").glob("*.json"))]
