"""SQLite: one table with the key as its primary key."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from tools.bench.storage_libraries.task import FilterTask, LookupTask, Task, WriteTask, key_of


def write_vectors(data: Path, folder: Path) -> None:
    """The vectors in one table, the metadata in another, so that a scan does not pass over vectors."""
    vectors = np.load(data / "vectors.npy", mmap_mode="r")
    samples = pq.read_table(data / "samples.parquet").to_pydict()
    with sqlite3.connect(folder / "samples.db") as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("CREATE TABLE vectors (key TEXT PRIMARY KEY, vector BLOB)")
        connection.execute("CREATE TABLE samples (row INTEGER PRIMARY KEY, width INTEGER, caption TEXT)")
        rows = ((key_of(row), vectors[row].tobytes()) for row in range(len(vectors)))
        connection.executemany("INSERT INTO vectors VALUES (?, ?)", rows)
        metadata: Iterator[tuple[int, int, str]] = zip(
            range(len(vectors)), samples["width"], samples["caption"]
        )
        connection.executemany("INSERT INTO samples VALUES (?, ?, ?)", metadata)


class Lookup(LookupTask):
    """A prepared SELECT by key, with the file mapped."""

    num_lookups = 5000

    def prepare(self) -> None:
        write_vectors(self.data, self.folder)

    def open_rows(self) -> None:
        self.connection = sqlite3.connect(self.folder / "samples.db")
        self.connection.execute("PRAGMA mmap_size = 17179869184")

    def lookup(self) -> Callable[[str], object]:
        cursor = self.connection.cursor()
        sql = "SELECT vector FROM vectors WHERE key = ?"
        return lambda key: cursor.execute(sql, (key,)).fetchone()[0]


class Filter(FilterTask):
    """A table scan."""

    def prepare(self) -> None:
        write_vectors(self.data, self.folder)

    def open(self) -> None:
        self.connection = sqlite3.connect(self.folder / "samples.db")

    def rows(self) -> np.ndarray:
        found = self.connection.execute(f"SELECT row FROM samples WHERE {self.condition}")
        return np.fromiter((row for (row,) in found), np.int64)


class Write(WriteTask):
    """One transaction with synchronous = FULL."""

    def write(self, target: Path) -> None:
        target.mkdir()
        with sqlite3.connect(target / "pictures.db") as connection:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("CREATE TABLE pictures (key TEXT PRIMARY KEY, picture BLOB)")
            connection.executemany("INSERT INTO pictures VALUES (?, ?)", zip(self.keys, self.pictures))


TASKS: dict[str, Callable[[Path, Path], Task]] = {"lookup": Lookup, "filter": Filter, "write": Write}
