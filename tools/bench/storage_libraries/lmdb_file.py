"""LMDB alone: a memory-mapped tree of keys and bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np

from tools.bench.storage_libraries.task import LookupTask, Task, WriteTask, key_of


class Lookup(LookupTask):
    """`get` in a transaction that stays open; the bytes are copied by LMDB's binding."""

    def prepare(self) -> None:
        vectors = np.load(self.data / "vectors.npy", mmap_mode="r")
        with lmdb.open(str(self.folder / "lmdb"), map_size=1 << 36, sync=False) as env:
            for start in range(0, len(vectors), 10_000):
                with env.begin(write=True) as transaction:
                    for row in range(start, min(start + 10_000, len(vectors))):
                        transaction.put(key_of(row).encode(), vectors[row].tobytes(), append=True)

    def open_rows(self) -> None:
        self.env = lmdb.open(str(self.folder / "lmdb"), readonly=True, lock=False)

    def lookup(self) -> Callable[[str], object]:
        transaction = self.env.begin()
        return lambda key: transaction.get(key.encode())


class Write(WriteTask):
    """Transactions of 500 puts, one sync at the end."""

    def write(self, target: Path) -> None:
        with lmdb.open(str(target), map_size=1 << 33, sync=False) as env:
            for start in range(0, len(self.keys), 500):
                with env.begin(write=True) as transaction:
                    for row in range(start, min(start + 500, len(self.keys))):
                        transaction.put(self.keys[row].encode(), self.pictures[row])
            env.sync(True)


TASKS: dict[str, Callable[[Path, Path], Task]] = {"lookup": Lookup, "write": Write}
