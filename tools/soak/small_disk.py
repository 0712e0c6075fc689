"""A disk of a few megabytes for this process only, and memory that ends early."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

__all__ = ["mount_read_only", "mount_small_disk", "only_bytes_free", "only_files_free"]

_libc = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUSER = 0x20000, 0x10000000
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 0x4000, 1 << 18


def mount_small_disk(folder: Path, num_bytes: int, num_files: int) -> bool:
    """Put a tmpfs at `folder`, seen by this process and its children only; False where that is not allowed.

    To be called by a process without threads that ends soon: the disk ends with it.
    """
    if not _enter_namespace():
        return False
    options = f"size={num_bytes},nr_inodes={num_files}".encode()
    return _libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options) == 0


def mount_read_only(folder: Path) -> bool:
    """Let nobody of this process and its children write below `folder`; False where that is not allowed."""
    if not _enter_namespace():
        return False
    place = os.fsencode(folder)
    if _libc.mount(place, place, None, _BIND | _REC, None):
        return False
    return _libc.mount(None, place, None, _REMOUNT | _BIND | _RDONLY, None) == 0


def _enter_namespace() -> bool:
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(_NEWNS) and _libc.unshare(_NEWNS | _NEWUSER):
        return False
    with contextlib.suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1", encoding="ascii")
    return _libc.mount(b"none", b"/", None, _REC | _PRIVATE, None) == 0


@contextlib.contextmanager
def only_bytes_free(folder: Path, num_bytes: int, *, mounted: bool) -> Iterator[None]:
    """Fill the disk of `folder` but for so many bytes; without a disk of its own, no file may be longer."""
    if not mounted:
        with _no_file_longer_than(num_bytes):
            yield
        return
    ballast = folder / "ballast"
    status = os.statvfs(folder)
    taken = status.f_bavail * status.f_frsize - num_bytes
    with ballast.open("wb") as file:
        if taken > 0:
            os.posix_fallocate(file.fileno(), 0, taken)
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def _no_file_longer_than(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@contextlib.contextmanager
def only_files_free(folder: Path, num_files: int) -> Iterator[None]:
    """Use up the names that the small disk at `folder` has, but for so many."""
    ballast = folder / "names"
    ballast.mkdir()
    for i in range(os.statvfs(folder).f_ffree - num_files):
        (ballast / str(i)).touch()
    try:
        yield
    finally:
        for path in ballast.iterdir():
            path.unlink()
        ballast.rmdir()
