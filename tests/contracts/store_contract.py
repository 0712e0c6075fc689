"""What every place of a store promises: one class each for control files, blobs, tensors and the index.

A test class inherits them and gives the fixture `store`: what `fill` wrote, as its readers open it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading

import numpy as np
import pyarrow.parquet as pq
import pytest

from storage import (
    ColumnError,
    CorruptionError,
    FeatureStore,
    KeyNotFoundError,
    MissingShardError,
    StorageError,
)
from storage.manifest import FileRef

ROWS_OF_PARTS = (40, 1, 23)


def blob_of(row: int) -> bytes | None:
    return None if row % 7 == 3 else bytes([row]) * (row * 11 % 500)


def tensor_of(row: int) -> np.ndarray:
    return np.arange(row, row + 6, dtype=np.int16).reshape(2, 3)


def fill(store: FeatureStore) -> FeatureStore:
    """Three parts, a tag on the second snapshot, a quarantine file."""
    row = 0
    for count in ROWS_OF_PARTS:
        with store.writer(message=f"{count} rows") as writer:
            for number in range(row, row + count):
                writer.add(f"key {number}", blob_of(number), {"t": tensor_of(number)}, width=number % 5)
            writer.quarantine(key=f"bad {row}", place="here", reason="test", data=b"123")
        row += count
    store.tag("second", 2)
    return store.refresh()


class ControlContract:
    def test_lists_reads_and_misses(self, store):
        backend = store.backend
        assert sorted(backend.names("snapshots")) == [f"{number:08d}.json" for number in range(4)]
        assert backend.names("tags") == ["second.json"] and backend.names("nothing") == []
        assert backend.read("snapshots/00000001.json").startswith(b"{")
        with pytest.raises(FileNotFoundError):
            backend.read("snapshots/00000009.json")

    def test_versions_and_names(self, store):
        assert store.at("second").snapshot == store.at(2).snapshot and store.tags() == {"second": 2}
        assert [snapshot.id for snapshot in store.log()] == [3, 2, 1, 0]
        assert store.diff(1, "second").rows_added.tolist() == [40]
        with pytest.raises(StorageError, match="'secont'; did you mean 'second'"):
            store.at("secont")

    def test_handles_survive_pickling(self, store):
        copy = pickle.loads(pickle.dumps(store))  # noqa: S301
        assert copy.snapshot == store.snapshot and copy.url == store.url and copy.key(5) == "key 5"

    def test_writing_is_exclusive_or_refused(self, store):
        backend = store.backend
        if backend.read_only:
            for change in (lambda: store.tag("x"), lambda: store.writer().__enter__(), lambda: store.gc()):
                with pytest.raises(StorageError, match="can only be read; write to a folder"):
                    change()
            return
        barrier, won = threading.Barrier(8), []

        def create(number):
            barrier.wait()
            if backend.create("tags/race.json", b"%d" % number):
                won.append(number)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1 and backend.read("tags/race.json") == b"%d" % won[0]
        before = backend.version("tags/race.json")
        backend.remove("tags/race.json")
        with pytest.raises(FileNotFoundError):
            backend.remove("tags/race.json")
        with pytest.raises(FileNotFoundError):
            backend.version("tags/race.json")
        assert backend.create("tags/race.json", b"again") and backend.version("tags/race.json") != before

    def test_a_held_file_stays(self, store):
        backend = store.backend
        if backend.read_only:
            return
        assert backend.create("tags/held.json", b"1")
        lease = backend.hold("tags/held.json")
        assert not backend.remove_unless_held("tags/held.json", lambda: False)
        del lease
        assert not backend.remove_unless_held("tags/held.json", lambda: True)
        assert backend.remove_unless_held("tags/held.json", lambda: False)
        with pytest.raises(FileNotFoundError):
            backend.hold("tags/held.json")

    def test_commits_of_threads_are_all_there(self, store):
        if store.backend.read_only:
            return

        def commit(name):
            for number in range(3):
                store.append([{"key": f"{name} {number}", "blob": b"1", "tensors": {"t": tensor_of(0)}}])

        threads = [threading.Thread(target=commit, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        newest = store.refresh()
        assert len(newest) == sum(ROWS_OF_PARTS) + 9 and newest.verify().ok

    def test_compaction_and_gc_leave_what_is_listed(self, store):
        if store.backend.read_only:
            return
        store.delete("width = 4")
        store.refresh().compact()
        store.untag("second")
        newest = store.refresh()
        assert newest.gc(grace_s=0, keep_last=1).removed
        assert newest.verify().ok and store.verify().ok  # The older one is held by its handle.
        assert newest.blob(42) == blob_of(42) and newest.tensor("t")[5:8].tolist() == [
            tensor_of(row).tolist() for row in range(5, 8)
        ]


class BlobContract:
    def test_blobs_come_back(self, store):
        for row in range(sum(ROWS_OF_PARTS)):
            if blob_of(row) is None:
                with pytest.raises(StorageError, match="has no blob"):
                    store.blob(row)
            else:
                assert bytes(store.blob(row)) == blob_of(row)

    def test_keys_and_rows(self, store):
        assert [store.row(f"key {row}") for row in (0, 40, 63)] == [0, 40, 63] and store.key(41) == "key 41"
        with pytest.raises(KeyNotFoundError, match="key 1"):
            store.row("key 1x")

    def test_a_fork_reads_on(self, store):
        assert store.blob(5) == blob_of(5)
        child = multiprocessing.get_context("fork").Process(target=_read_in_child, args=(store,))
        child.start()
        child.join(60)
        assert child.exitcode == 0

    def test_what_no_file_holds_is_refused(self, store):
        ref = store.snapshot.parts[0].blobs
        other = FileRef(path="blobs/none/data.mdb", bytes=ref.bytes, xxh3=ref.xxh3, rows=ref.rows)
        longer = FileRef(path=ref.path, bytes=ref.bytes + 1, xxh3=ref.xxh3, rows=ref.rows)
        with pytest.raises(MissingShardError, match="missing"):
            store.backend.open_shard(other)
        with pytest.raises(CorruptionError, match=rf"{ref.bytes} bytes, the snapshot says {ref.bytes + 1}"):
            store.backend.open_shard(longer)


def _read_in_child(store: FeatureStore) -> None:
    row = sum(ROWS_OF_PARTS) - 1
    whole = store.blob(row) == blob_of(row) and store.tensor("t")[row : row + 1].tolist() == [
        tensor_of(row).tolist()
    ]
    os._exit(0 if whole and len(store.select("width = 1")) == 13 else 1)


class TensorContract:
    def test_views_and_gathers(self, store):
        rows = np.array([63, 0, 40, 39, 0])
        assert store.tensor("t").gather(rows).tolist() == [tensor_of(row).tolist() for row in rows]
        assert store.tensor("t")[3:9].tolist() == [tensor_of(row).tolist() for row in range(3, 9)]
        assert store.counters.bytes_copied == 5 * 12

    def test_a_view_is_private(self, store):
        view = store.tensor("t")[0:4]
        view[:] = -1
        assert store.tensor("t")[0:4].tolist() == [tensor_of(row).tolist() for row in range(4)]
        assert store.tensor("t").gather(np.arange(4)).tolist() == store.tensor("t")[0:4].tolist()

    def test_rows_are_aligned(self, store):
        for part in range(len(ROWS_OF_PARTS)):
            ref = store.snapshot.parts[part].tensors["t"]
            mapped, _ = store.backend.map(ref)
            assert (
                mapped.__array_interface__["data"][0] + ref.offset
            ) % 64 == 0 and not mapped.flags.writeable


class IndexContract:
    def test_sql_over_all_parts(self, store):
        table = store.query("SELECT count(*) AS n, sum(width) AS w, count(bytes) AS b FROM samples")
        rows = range(sum(ROWS_OF_PARTS))
        assert table.to_pylist() == [
            {
                "n": len(rows),
                "w": sum(row % 5 for row in rows),
                "b": sum(blob_of(row) is not None for row in rows),
            }
        ]
        assert store.select("width = 2", order_by="row desc", limit=2).rows.tolist() == [62, 57]

    def test_columns(self, store):
        view = store.select("width >= 3")
        assert view.column("width").to_pylist() == [int(row) % 5 for row in view.rows]
        with pytest.raises(ColumnError, match="did you mean 'width'"):
            view.column("widht")

    def test_parquet_opens_the_file(self, store):
        part = store.snapshot.parts[0]
        assert pq.read_metadata(store.backend.local_file(part.index)).num_rows == part.rows == 40

    def test_quarantine(self, store):
        assert store.quarantined().column("key").to_pylist() == ["bad 0", "bad 40", "bad 41"]

    def test_verify(self, store):
        report = store.verify()
        assert report.ok and report.files == 3 * 5


class StoreContract(ControlContract, BlobContract, TensorContract, IndexContract):
    pass
