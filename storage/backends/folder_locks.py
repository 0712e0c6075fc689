"""Locks on folders of writers, which a kill releases, so that gc can tell who is at work.

They are seen on one machine, and not on every network file system. Where there are none, the grace period of
gc is what protects a writer.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import ExitStack
from pathlib import Path

__all__ = ["hold_abandoned", "lock_folder"]

_LOCK_NAME = "writer.lock"
_POLL_S = 0.01


def lock_folder(folder: Path) -> int | None:
    """Make a folder if there is none and lock it; None while another writer has it. Waits for gc.

    Returns:
        A descriptor that holds the lock until it is closed.
    """
    path = folder / _LOCK_NAME
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            continue  # gc removed the folder.
        if not _lock(fd):
            os.close(fd)
            return None
        if _is_named(fd, path):
            return fd
        os.close(fd)


def _lock(fd: int) -> bool:
    """Lock for a writer; False while another writer has the lock. gc holds it shared."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(fd, fcntl.LOCK_UN)
        time.sleep(_POLL_S)


def _is_named(fd: int, path: Path) -> bool:
    """Whether the file that is open still has its name: gc may have removed it before it was locked."""
    try:
        named = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def hold_abandoned(folder: Path, until: ExitStack) -> bool:
    """Whether the writer of a folder is gone; if so it cannot come back before `until` is closed."""
    try:
        fd = os.open(folder / _LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True
    until.callback(os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
