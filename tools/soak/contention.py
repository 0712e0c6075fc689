"""Processes and threads that change one store against each other: python -m tools.soak.contention"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from storage import FeatureStore
from tools.soak.actions import act, check, create, read

__all__ = ["contend"]


class _Threads:
    """Threads whose first error is raised when they are joined."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, function: Callable[..., object], *arguments: object) -> None:
        """Run a function in another thread."""

        def run() -> None:
            try:
                function(*arguments)
            except BaseException as error:
                self._errors.append(error)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def join(self) -> None:
        """Wait for all."""
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]


def contend(path: Path, seed: int, times: int) -> None:
    """Let two processes and two threads do `times` actions each on a new store, with readers at work.

    gc has no grace and keeps two snapshots, so only the locks protect what is in use.

    Raises:
        AssertionError, StorageError: When something was lost, or a reader or writer met what it should not.
    """
    create(path)
    context = multiprocessing.get_context("forkserver")
    names = [f"p{i}" for i in range(2)]
    children = [
        context.Process(target=act, args=(path, name, seed + i, times)) for i, name in enumerate(names)
    ]
    stop = threading.Event()

    def read_the_newest() -> None:
        while not stop.is_set():
            read(path)

    def read_one_snapshot() -> None:
        store = FeatureStore.open(path)
        while not stop.is_set():
            report = store.verify()
            assert report.ok, report.problems

    writers, readers = _Threads(), _Threads()
    for child in children:
        child.start()
    for i in range(2):
        writers.start(act, path, f"t{i}", seed + 2 + i, times)
    readers.start(read_the_newest)
    readers.start(read_one_snapshot)
    for child in children:
        child.join()
    try:
        writers.join()
    finally:
        stop.set()
        readers.join()
    assert [child.exitcode for child in children] == [0, 0], "a writing process failed; its error is above"
    check(path, "end")
    FeatureStore.open(path).gc(grace_s=0)
    left = sorted(entry.name for entry in (path / "staging").iterdir())
    assert not left, f"gc left {left} in staging"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begin = time.monotonic()
    for number in range(given.rounds):
        with tempfile.TemporaryDirectory() as scratch:
            contend(Path(scratch) / "store", given.seed + 10 * number, 40)
        left = (time.monotonic() - begin) / (number + 1) * (given.rounds - number - 1)
        print(f"{number + 1} of {given.rounds} rounds of contention, about {left:.0f} s left", flush=True)
    print("nothing was lost to contention")


if __name__ == "__main__":
    main()
