"""A disk that is full at every point of every action: python -m tools.soak.filling

Each action is done again and again with a little more room, until it fits. Whatever the room, the store must
stay readable, the error must be one of the store's, and gc must remove what was left.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from storage import FeatureStore, StorageError
from tools.soak.actions import ACTIONS, check, create, journal_of, perform
from tools.soak.small_disk import mount_small_disk, only_bytes_free, only_files_free
from tools.soak.tracing import fork

__all__ = ["fill_disk"]

_DISK_BYTES = 24 << 20
_DISK_FILES = 600


def fill_disk(scratch: Path, tries: int, tell: Callable[[str], None]) -> None:
    """Try each action with up to `tries` amounts of room, spread over what it needs.

    Raises:
        SystemExit: When something was lost or left; the details go to standard error.
    """
    begin = time.monotonic()
    for number, action in enumerate(ACTIONS):
        _, status = os.waitpid(fork(lambda action=action: _fill(scratch / action, action, tries)), 0)
        if status:
            raise SystemExit(f"{action} on a full disk failed; its error is above")
        left = (time.monotonic() - begin) / (number + 1) * (len(ACTIONS) - number - 1)
        tell(f"full disk: {action} is safe, about {left:.0f} s left")


def _fill(scratch: Path, action: str, tries: int) -> None:
    """In a process of its own: a small disk, and one action on it."""
    disk = scratch / "disk"
    disk.mkdir(parents=True)
    base = scratch / "base" / "store"
    base.parent.mkdir()
    create(base)
    perform("append", base, "second", 0)
    perform("delete", base, "second", 0)
    is_mounted = mount_small_disk(disk, _DISK_BYTES, _DISK_FILES)
    needed = _least_room(base, disk, action, is_mounted)
    for room in _spread(needed, tries):
        _try(base, disk, action, only_bytes_free(disk, room, mounted=is_mounted))
    if is_mounted:
        for room in range(0, 24, max(1, 24 // tries)):
            _try(base, disk, action, only_files_free(disk, room))


def _spread(needed: int, tries: int) -> Iterator[int]:
    pages = -(-needed // 4096)
    yield from (4096 * (pages * i // tries) for i in range(tries + 1))


def _least_room(base: Path, disk: Path, action: str, is_mounted: bool) -> int:
    """A power of two that is enough room for the action."""
    room = 4096
    while not _try(base, disk, action, only_bytes_free(disk, room, mounted=is_mounted)):
        room *= 2
    return room


def _try(base: Path, disk: Path, action: str, limit: AbstractContextManager[None]) -> bool:
    """Do the action under a limit; whether it fitted."""
    path = disk / "store"
    shutil.copytree(base, path)
    outside = base.parent / "journal"
    shutil.copy(journal_of(base), outside)
    journal_of(path).symlink_to(outside)
    before = FeatureStore.open(path).snapshot.id
    with limit:
        fitted = True
        try:
            perform(action, path, "full", 0)
        except StorageError as error:
            assert "free" in str(error), f"{error!r} does not tell how much is free"
            fitted = False
        store = FeatureStore.open(path, verify="always")
        assert store.verify().ok and (fitted or store.snapshot.id == before)
    del store
    store = FeatureStore.open(path)
    store.gc(grace_s=0)
    left = sorted(entry.name for entry in (path / "staging").iterdir())
    assert not left, f"gc left {left} in staging"
    again = store.gc(grace_s=0).removed
    assert not again, f"gc removed {again} only when it was run again"
    check(path, "room")
    shutil.rmtree(path)
    journal_of(path).unlink()
    return fitted


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        fill_disk(Path(scratch), given.tries, lambda text: print(text, flush=True))
    sys.stdout.write("no action lost anything on a full disk\n")


if __name__ == "__main__":
    main()
