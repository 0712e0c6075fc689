"""Reading a store in a folder."""

from __future__ import annotations

import difflib
import fcntl
import os
import stat
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path

from storage.backends.base import Backend, Lease
from storage.errors import (
    CorruptionError,
    ManifestError,
    MissingShardError,
    StorageError,
)
from storage.manifest import FileRef

__all__ = ["LocalFolder"]

_MAX_CONTROL_BYTES = 1 << 30


class LocalFolder(Backend):
    """The part of a backend in a folder that reads. path: as given, made absolute."""

    def __init__(self, path: str | Path) -> None:
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

    def absence(self) -> str:
        reason = (
            "this is not a feature store (no snapshots/ in it)"
            if self.path.exists()
            else "there is no such folder"
        )
        near = difflib.get_close_matches(self.path.name, _stores_in(self.path.parent), n=1, cutoff=0.5)
        meant = near or sorted(f"{self.path.name}/{name}" for name in _stores_in(self.path))[:3]
        hint = (
            f"did you mean {' or '.join(str(self.path.parent / name) for name in meant)}?"
            if meant
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
                    f"{self.place(ref.path)}: the shard has {found.st_size} bytes by now, "
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


def _stores_in(folder: Path) -> list[str]:
    """The stores of a folder, as far as this user may look."""
    found = []
    with suppress(OSError):
        for entry in folder.iterdir():
            with suppress(OSError):
                if any((entry / "snapshots").glob("*.json")):
                    found.append(entry.name)
    return found
