"""What a library does in one task of the storage benchmark. Runs in the peers' environment: numpy only."""

from __future__ import annotations

import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

BATCH_SIZE = 256
Result = dict[str, float | list[float]]


class Task(ABC):
    """Made once in a process, then run once a round.

    data: folder with the common input.
    folder: the library's own files, kept from an earlier run when they were complete.
    """

    def __init__(self, data: Path, folder: Path) -> None:
        self.data = data
        self.folder = folder
        done = folder / "complete"
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self.prepare()
            done.touch()
        self.open()

    def prepare(self) -> None:  # noqa: B027  many tasks need nothing here
        """Write the library's files from the common input. Not measured."""

    def open(self) -> None:  # noqa: B027
        """Open them. Not measured."""

    @abstractmethod
    def run(self, round_number: int) -> Result:
        """One measurement: name -> seconds, or seconds of many small operations."""


def warm(folder: Path) -> None:
    """Read every file below a folder, so that all libraries find theirs in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass


class EpochTask(Task):
    """Every row once in random order, into batches that were allocated before."""

    source = "images64.npy"

    def open(self) -> None:
        warm(self.folder)
        images = np.load(self.data / self.source, mmap_mode="r")
        self.num_rows = len(images)
        self.shape = images.shape[1:]
        self.out = np.empty((BATCH_SIZE, *self.shape), np.uint8)
        self.open_rows()

    def open_rows(self) -> None:
        """Open the library's files."""

    def order(self, round_number: int) -> np.ndarray:
        """The rows of one epoch."""
        return np.random.default_rng(round_number).permutation(self.num_rows)

    def run(self, round_number: int) -> Result:
        order = self.order(round_number)
        started = time.perf_counter()
        rows, total = self.epoch(order)
        elapsed = time.perf_counter() - started
        return {"seconds": elapsed, "rows": rows, "sum": total}

    @abstractmethod
    def epoch(self, order: np.ndarray) -> tuple[int, int]:
        """Deliver the epoch; how many rows came, and the sum of their first bytes."""

    def collect(self, samples: Iterable[np.ndarray]) -> tuple[int, int]:
        """Copy samples one by one into the batch."""
        filled = rows = total = 0
        for sample in samples:
            self.out[filled] = sample
            filled += 1
            if filled == BATCH_SIZE:
                total += self.first_bytes(filled)
                rows, filled = rows + filled, 0
        return rows + filled, total + self.first_bytes(filled)

    def batches(self, order: np.ndarray) -> Iterator[np.ndarray]:
        """The rows of each batch."""
        for start in range(0, len(order), BATCH_SIZE):
            yield order[start : start + BATCH_SIZE]

    def first_bytes(self, count: int) -> int:
        return int(self.out[:count].reshape(count, -1)[:, 0].sum()) if count else 0


class LookupTask(Task):
    """One row at a time by its key, in random order."""

    num_lookups = 20_000

    def open(self) -> None:
        warm(self.folder)
        self.num_rows = len(np.load(self.data / "vectors.npy", mmap_mode="r"))
        self.open_rows()

    def open_rows(self) -> None:
        """Open the library's files."""

    @abstractmethod
    def lookup(self) -> Callable[[str], object]:
        """The function that gives the vector of a key, float16 (768,), or its bytes."""

    def run(self, round_number: int) -> Result:
        order = np.random.default_rng(round_number).permutation(self.num_rows)[: self.num_lookups]
        lookup = self.lookup()
        keys = [key_of(row) for row in order.tolist()]
        seconds = [0.0] * len(keys)
        clock = time.perf_counter
        for i, key in enumerate(keys):
            started = clock()
            lookup(key)
            seconds[i] = clock() - started
        found = np.asarray(lookup(keys[-1]))
        if not isinstance(found, np.ndarray) or found.dtype != np.float16:
            found = np.frombuffer(found, np.float16)
        wanted = np.load(self.data / "vectors.npy", mmap_mode="r")[order[-1]]
        if not np.array_equal(found.reshape(-1), wanted):
            raise ValueError(f"{type(self).__name__}: key {keys[-1]} gave another vector")
        return {"seconds": seconds}


class FilterTask(Task):
    """The row numbers that meet a condition on a number and a text."""

    condition = "width > 300 AND caption LIKE '%red%'"

    def run(self, round_number: int) -> Result:
        started = time.perf_counter()
        rows = self.rows()
        elapsed = time.perf_counter() - started
        return {"seconds": elapsed, "rows": len(rows), "sum": int(np.sum(rows))}

    @abstractmethod
    def rows(self) -> np.ndarray:
        """The row numbers, int64, in any order."""


class WriteTask(Task):
    """All pictures into a new data set that is durable at the end."""

    def open(self) -> None:
        content = (self.data / "pictures.bin").read_bytes()
        ends = np.load(self.data / "pictures.npy").tolist()
        self.pictures = [content[start:end] for start, end in zip([0, *ends], ends)]
        self.keys = [f"picture-{number:06d}" for number in range(len(ends))]

    def run(self, round_number: int) -> Result:
        target = self.folder / f"round-{round_number}"
        os.sync()
        started = time.perf_counter()
        self.write(target)
        elapsed = time.perf_counter() - started
        shutil.rmtree(target)
        return {"seconds": elapsed, "bytes": sum(map(len, self.pictures))}

    @abstractmethod
    def write(self, target: Path) -> None:
        """Write the data set into a folder that does not exist yet."""


def make_durable(folder: Path) -> None:
    """fsync every file and folder below `folder`, for libraries that do not."""
    for path in [folder.parent, folder, *folder.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def key_of(row: int) -> str:
    """The key of a row of the vectors."""
    return f"sample-{row:08d}"
