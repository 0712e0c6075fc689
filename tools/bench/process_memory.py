"""How much memory a process and all below it take, while they run."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil

__all__ = ["PeakMemory", "private_bytes"]

_EVERY_S = 0.2


class PeakMemory:
    """Samples a process tree inside a `with` block.

    Counted are anonymous and shared memory, each page once, however many processes share it. Pages of mapped
    files are not counted: the system can drop them.
    """

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._root = psutil.Process(pid)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(_EVERY_S):
            try:
                tree = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            self.peak_bytes = max(self.peak_bytes, sum(private_bytes(process.pid) for process in tree))


def private_bytes(pid: int) -> int:
    """Anonymous and shared memory of one process, a shared page counted in parts; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    wanted = ("Pss_Anon:", "Pss_Shmem:")
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(wanted))
