"""One process at a time works on a run: a lock that the end of the process releases, however it ends."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unirl.errors import ConfigError

__all__ = ["WAIT_S", "lock_run"]

log = logging.getLogger("unirl.trainer.run")

FILE = ".lock"
WAIT_S = 30.0
"""A run that was told to stop may take so long to end, and its next start waits for that."""
LOOK_EVERY_S = 0.2


@contextmanager
def lock_run(run: Path, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """A block in which no other process works on a run; the folder is made if it is not there.

    Where the file system knows no locks, as some of networks do not, a warning says that nothing is held off.

    Raises:
        ConfigError: If another process still works on the run after `wait_s` seconds; it is named.
    """
    run.mkdir(parents=True, exist_ok=True)
    with (run / FILE).open("a+") as file:
        deadline, is_told = time.monotonic() + wait_s, False
        while not _take(file.fileno(), run):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{run}: {_holder(run)} works on this run, and two would write over each other; wait for "
                    "its end or stop it (SIGTERM saves its state), or give the new run another directory"
                )
            if not is_told:
                log.warning("%s: waiting up to %.0f s for %s to end", run, wait_s, _holder(run))
                is_told = True
            time.sleep(LOOK_EVERY_S)
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
        file.flush()
        yield


def _take(descriptor: int, run: Path) -> bool:
    """Lock for this process; a forked worker that outlives it, unlike with flock, holds nothing."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        log.warning("%s: cannot be locked (%s); see to it that no second process works on it", run, error)
    return True


def _holder(run: Path) -> str:
    try:
        said = json.loads((run / FILE).read_text())
        return f"process {said['pid']} on {said['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
