"""A store in a folder of this machine, or in one that machines share."""

from __future__ import annotations

import difflib
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from storage.backends.base import NEWEST, Backend, Lease, StoredFile, Workspace
from storage.backends.network import network_file_system
from storage.backends.workspaces import Workspaces
from storage.disk import write_errors
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

ALLOW_NETWORK_FS = "UNIRL_ALLOW_NETWORK_FS"
_MAX_CONTROL_BYTES = 1 << 30
_FOLDERS_OF_COMMITS = ("blobs", "staging")


class LocalBackend(Backend):
    """A folder. path: as given, made absolute."""

    def __init__(self, path: str | Path, *, allow_network_fs: bool | None = None) -> None:
        """
        Args:
            path: The folder.
            allow_network_fs: Write although the folder is on a network file system; None asks the
                environment variable UNIRL_ALLOW_NETWORK_FS.
        """
        self.path = Path(path).absolute()
        try:
            str(self.path).encode()
        except UnicodeEncodeError:
            raise StorageError(
                f"{str(self.path)!r}: the path is not UTF-8, which SQL needs to name files; rename the folder"
            ) from None
        self.url = str(self.path)
        self.identity = os.path.realpath(self.path)
        self.read_only = False
        self._allow_network_fs = allow_network_fs
        self._is_on_network: bool | None = None
        self._workspaces = Workspaces(self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(LocalBackend, allow_network_fs=self._allow_network_fs), (self.path,)

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
        try:
            return os.listdir(path)  # noqa: PTH208
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StorageError(f"{path}: the folder cannot be read: {error.strerror}") from error

    def read(self, name: str) -> bytes:
        path = self.path / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ManifestError(f"{path}: the file cannot be read: {error.strerror}") from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_CONTROL_BYTES:
                raise ManifestError(
                    f"{path}: this is no plain file of at most {_MAX_CONTROL_BYTES} bytes; remove it"
                )
            with open(fd, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(fd)

    def version(self, name: str) -> Hashable:
        status = (self.path / name).lstat()
        return status.st_ino, status.st_size, status.st_mtime_ns

    # Shards

    def open_shard(self, ref: FileRef) -> int:
        path = self._path_of(ref)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
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

    def _path_of(self, ref: FileRef) -> str:
        """Where a shard lies. The folder of the store is a real path; every step below it is looked at."""
        path = self.identity
        for step in ref.path.split("/"):
            path = f"{path}/{step}"
            try:
                is_link = stat.S_ISLNK(os.lstat(path).st_mode)
            except OSError:
                continue  # Opening it tells what is wrong.
            if is_link:
                raise ManifestError(
                    f"{path}: a symbolic link stands in the path of a shard; replace it by the file itself"
                )
        return path

    def local_file(self, ref: FileRef) -> Path:
        os.close(self.open_shard(ref))
        return Path(self.identity, ref.path)

    def confirm(self, ref: FileRef, identity: Hashable) -> None:
        with suppress(
            FileNotFoundError
        ):  # A file that is gone stays mapped, and so does one that was replaced.
            found = os.stat(f"{self.identity}/{ref.path}")  # noqa: PTH116
            if found.st_size != ref.bytes and (found.st_dev, found.st_ino) == identity:
                raise CorruptionError(
                    f"{self.place(ref.path)}: the shard was cut to {found.st_size} bytes while in use, "
                    f"the snapshot says {ref.bytes}; copy it back from a backup"
                )

    def current_identity(self, ref: FileRef) -> Hashable | None:
        try:
            status = Path(self.identity, ref.path).lstat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

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


def _stores_in(folder: Path) -> list[str]:
    """The stores of a folder, as far as this user may look."""
    found = []
    with suppress(OSError):
        for entry in folder.iterdir():
            with suppress(OSError):
                if any((entry / "snapshots").glob("*.json")):
                    found.append(entry.name)
    return found
