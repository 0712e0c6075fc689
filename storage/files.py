"""Files that are complete or absent: durable writes, checked reads, private maps.

A shard never changes once it has its name. Its size is compared before it is mapped, so a short file is an
error and not a SIGBUS. Maps hold no file descriptor, live as long as an array looks at them, and survive
a fork.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from storage.errors import StorageError

__all__ = [
    "file_identity",
    "fsync_directory",
    "fsync_file",
    "hash_descriptor",
    "hash_file",
    "map_descriptor",
    "publish_exclusively",
    "start_writing",
]

_CHUNK_BYTES = 1 << 18  # Stays in the cache of the processor between reading and hashing.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_SYNC_FILE_RANGE_WRITE = 2
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
    """Give `content` the name `path`, durably and all at once; False when the name is already taken.

    Raises:
        FileNotFoundError: If somebody removed the temporary file.
        StorageError: If the file system has no hard links.
    """
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if not _link(temporary, path):
            return False
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)
    return True


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except FileExistsError:
        # A network file system may repeat a request whose answer was lost, and find the name of the first.
        return os.path.samestat(source.lstat(), target.lstat())
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        raise StorageError(
            f"{target}: the file system has no hard links ({error.strerror}), by which one of two writers is "
            "kept from replacing what the other published; keep the store on another file system"
        ) from error
    return True


def start_writing(fd: int) -> None:
    """Let the system begin to write a file to the disk, so that a later sync waits for less."""
    if hasattr(_libc, "sync_file_range"):
        _libc.sync_file_range(fd, ctypes.c_longlong(0), ctypes.c_longlong(0), _SYNC_FILE_RANGE_WRITE)


def hash_file(path: Path) -> str:
    """xxh3_128 of the whole file, as 32 hexadecimal digits."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return hash_descriptor(fd)
    finally:
        os.close(fd)


def hash_descriptor(fd: int) -> str:
    """xxh3_128 of what an open file holds from where it stands."""
    digest = xxhash.xxh3_128()
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    while size := os.readv(fd, [chunk]):
        digest.update(chunk[:size])
    return digest.hexdigest()


def file_identity(fd: int) -> tuple[int, int]:
    """What tells an open file from any other."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def map_descriptor(fd: int, start: int, stop: int, place: str, *, private: bool = False) -> np.ndarray:
    """Map bytes start:stop of an open file; uint8 (stop - start,).

    Read-only, or copy-on-write with `private`. `place` names the file in errors.

    Raises:
        StorageError: If the system refuses.
    """
    aligned = start - start % mmap.ALLOCATIONGRANULARITY
    if private:
        mapped = _map(fd, aligned, stop - aligned, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, place)
    else:
        mapped = _map(fd, aligned, stop - aligned, mmap.PROT_READ, mmap.MAP_SHARED, place)
    return mapped[start - aligned :]


def _map(fd: int, offset: int, length: int, prot: int, flags: int, place: str) -> np.ndarray:
    if length == 0:
        return np.empty(0, np.uint8)
    address = _libc.mmap(None, length, prot, flags, fd, offset)
    if address == _MAP_FAILED:
        error = os.strerror(ctypes.get_errno())
        raise StorageError(f"{place}: {length} bytes cannot be mapped: {error}")
    pages: Any = (ctypes.c_ubyte * length).from_address(address)
    # Arrays may outlive the interpreter's exit handlers, so the map is never taken away from them at exit.
    weakref.finalize(pages, _libc.munmap, address, length).atexit = False
    array = np.frombuffer(pages, np.uint8)
    array.flags.writeable = bool(prot & mmap.PROT_WRITE)
    return array
