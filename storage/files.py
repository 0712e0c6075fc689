"""Files that are complete or absent: durable writes, checked reads, private maps.

A shard never changes once it has its name. Its size is compared before it is mapped, so a short file is an
error and not a SIGBUS. Maps hold no file descriptor, live as long as an array looks at them, and survive
a fork.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from storage.errors import CorruptionError, ManifestError, MissingShardError, StorageError

__all__ = ["fsync_directory", "fsync_file", "hash_file", "map_private", "map_shared", "publish_exclusively"]

_CHUNK_BYTES = 1 << 22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


def fsync_file(path: Path) -> None:
    """Make the content of a file durable."""
    _fsync(path, os.O_RDONLY)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish_exclusively(path: Path, content: bytes, temporary: Path) -> bool:
    """Give `content` the name `path`, durably and all at once; False when the name is already taken."""
    with temporary.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    fsync_directory(path.parent)
    return True


def hash_file(path: Path) -> str:
    """xxh3_128 of the whole file, as 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def open_shard(root: Path, relative: str, num_bytes: int) -> int:
    """Open a shard for reading after checking that it is a plain file inside the store of the promised size.

    Returns:
        A file descriptor that the caller closes.

    Raises:
        MissingShardError: If there is no such file.
        ManifestError: If a symbolic link stands in its path.
        CorruptionError: If its size differs.
    """
    path = root / relative
    real_root = os.path.realpath(root)
    if os.path.realpath(path) != os.path.join(real_root, *relative.split("/")):  # noqa: PTH118
        raise ManifestError(
            f"{path}: a symbolic link stands in the path of a shard; replace it by the file itself"
        )
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MissingShardError(
            f"{path}: the shard is missing; copy it back, or open an earlier snapshot that does not need it"
        ) from None
    except OSError as error:
        raise StorageError(f"{path}: the shard cannot be opened: {error.strerror}") from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
        os.close(fd)
        raise CorruptionError(
            f"{path}: the shard has {found.st_size} bytes, the snapshot says {num_bytes}; copy it "
            "back from a backup"
        )
    return fd


def map_shared(root: Path, relative: str, num_bytes: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Map a whole shard read-only; uint8 (num_bytes,), and what tells the file from any other."""
    fd = open_shard(root, relative, num_bytes)
    try:
        return _map(fd, 0, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, root / relative), _identity(fd)
    finally:
        os.close(fd)


def map_private(path: Path, identity: tuple[int, int], start: int, stop: int) -> np.ndarray:
    """Map bytes start:stop of a shard that map_shared has mapped copy-on-write; uint8 (stop - start,).

    Each call is a map of its own: what is written to it is seen by nobody else and reaches no file.

    Raises:
        CorruptionError: If there is another file by now.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if _identity(fd) != identity or os.fstat(fd).st_size < stop:
            raise CorruptionError(f"{path}: the shard was replaced while it was in use; open the store again")
        aligned = start - start % mmap.ALLOCATIONGRANULARITY
        mapped = _map(fd, aligned, stop - aligned, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, path)
        return mapped[start - aligned :]
    finally:
        os.close(fd)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _map(fd: int, offset: int, length: int, prot: int, flags: int, path: Path) -> np.ndarray:
    if length == 0:
        return np.empty(0, np.uint8)
    address = _libc.mmap(None, length, prot, flags, fd, offset)
    if address == _MAP_FAILED:
        error = os.strerror(ctypes.get_errno())
        raise StorageError(f"{path}: {length} bytes cannot be mapped: {error}")
    pages: Any = (ctypes.c_ubyte * length).from_address(address)
    # Arrays may outlive the interpreter's exit handlers, so the map is never taken away from them at exit.
    weakref.finalize(pages, _libc.munmap, address, length).atexit = False
    array = np.frombuffer(pages, np.uint8)
    array.flags.writeable = bool(prot & mmap.PROT_WRITE)
    return array
