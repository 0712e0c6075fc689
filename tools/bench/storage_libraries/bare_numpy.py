"""Nothing but numpy on a map: what a library could at best cost nothing beside."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tools.bench.storage_libraries.task import EpochTask, LookupTask, key_of


class Gather64(EpochTask):
    """numpy.take from the map of our own file into the batch, without checksums, row map or counters."""

    def open_rows(self) -> None:
        store = self.folder.parent / "ours"
        newest = max((store / "snapshots").glob("*.json"))
        file = json.loads(newest.read_text())["parts"][0]["tensors"]["image"]
        self.map = np.memmap(
            store / file["path"], np.uint8, "r", file["offset"], (self.num_rows, *self.shape)
        )

    def epoch(self, order: np.ndarray) -> tuple[int, int]:
        total = 0
        for rows in self.batches(order):
            np.take(self.map, rows, axis=0, out=self.out[: len(rows)], mode="clip")
            total += self.first_bytes(len(rows))
        return len(order), total


class Gather224(Gather64):
    source = "images224.npy"


class HashIndex(LookupTask):
    """An open-addressing table of key hashes in one mapped file, beside the vectors in another."""

    def prepare(self) -> None:
        import xxhash

        num_rows = len(np.load(self.data / "vectors.npy", mmap_mode="r"))
        slots = 1 << (2 * num_rows).bit_length()
        table = np.full((slots, 2), -1, np.int64)
        for row in range(num_rows):
            key_hash = xxhash.xxh3_64_intdigest(key_of(row).encode()) >> 1
            at = key_hash & (slots - 1)
            while table[at, 1] >= 0:
                at = (at + 1) & (slots - 1)
            table[at] = key_hash, row
        table.tofile(self.folder / "table.bin")

    def open_rows(self) -> None:
        with (self.folder / "table.bin").open("rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self.table = memoryview(self.map).cast("q")
        self.vectors = np.load(self.data / "vectors.npy", mmap_mode="r").view(np.ndarray)

    def lookup(self) -> Callable[[str], object]:
        from xxhash import xxh3_64_intdigest

        table, vectors = self.table, self.vectors
        mask = len(table) // 2 - 1

        def find(key: str) -> object:
            key_hash = xxh3_64_intdigest(key.encode()) >> 1
            at = key_hash & mask
            while table[2 * at] != key_hash:
                at = (at + 1) & mask
            return vectors[table[2 * at + 1]]

        return find


TASKS: dict[str, Callable[[Path, Path], EpochTask | LookupTask]] = {
    "epoch64": Gather64,
    "epoch224": Gather224,
    "lookup": HashIndex,
}
