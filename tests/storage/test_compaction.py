from __future__ import annotations

import numpy as np
import pytest

from storage import CommitConflictError, FeatureStore, StorageError
from storage.integrity import list_files


def content(store: FeatureStore, codes_of) -> list:
    rows = store.select().rows
    table = store.select().to_arrow(["row", "key", "hash", "bytes", "caption", "width"]).to_pylist()
    assert store.query("SELECT row FROM samples ORDER BY row").column(0).to_pylist() == rows.tolist()
    tensors = store.tensor("codes").gather(rows).tolist()
    return [(*item.values(), bytes(store.blob(item["row"])), codes) for item, codes in zip(table, tensors)]


def test_parts_are_joined_and_rows_keep_their_numbers(filled, filler, codes_of):
    store = filler(filler(filled, 100, 101), 101, 110)
    before = content(store, codes_of)
    snapshot = store.compact()
    after = store.refresh()
    assert len(snapshot.parts) == 1 and snapshot.message == "compact" and snapshot.parts[0].row_ids is None
    assert content(after, codes_of) == before
    assert after.verify().ok and after.tensor("codes")[55:65].shape == (10, 8)
    assert after.compact().id == snapshot.id
    assert content(store, codes_of) == before


def test_deleted_rows_are_left_out(filled, filler, codes_of):
    filled.delete("width % 3 = 1")
    store = filler(filled.refresh(), 100, 105)
    before = content(store, codes_of)
    assert sum(part.rows for part in store.snapshot.parts) == 105
    snapshot = store.compact()
    after = store.refresh()
    assert snapshot.deleted is None and snapshot.parts[0].row_ids is not None and snapshot.parts[0].rows == 72
    assert content(after, codes_of) == before
    assert after.row("k00102") == 102 and after.key(102) == "k00102"
    assert after.select("row >= 98").rows.tolist() == [98, 99, 100, 101, 102, 103, 104]
    assert after.tensor("codes")[2:4].shape == (2, 8)
    with pytest.raises(Exception, match=r"more than one shard|has no row"):
        after.tensor("codes")[2:6]
    with pytest.raises(Exception, match="no row 4"):
        after.blob(4)
    assert after.verify().ok and FeatureStore.open(after.path, snapshot=2).blob(4)


def test_compacting_goes_on_after_more_commits(filled, filler, codes_of):
    store = filled
    for step in range(3):
        store.delete(f"width % 7 = {step}")
        store = filler(store.refresh(), 100 + 10 * step, 110 + 10 * step)
        before = content(store, codes_of)
        store.compact()
        store = store.refresh()
        assert content(store, codes_of) == before and len(store.snapshot.parts) == 1
    store.add_column("n", lambda view: view.rows, dtype="int64", shape=())
    store = store.refresh()
    rows = store.select().rows
    assert store.tensor("n").gather(rows).tolist() == rows.tolist()
    assert store.refresh().verify().ok


def test_parts_of_other_columns_and_large_parts_stay_apart(filled, filler):
    filled.append([{"key": "plain"}])
    store = filler(filled.refresh(), 100, 110)
    assert [p.rows for p in store.compact().parts] == [100, 1, 10]
    big = filler(store.refresh(), 110, 120)
    size = sum(ref.bytes for ref in list_files(big.snapshot.parts[0]))
    assert [p.rows for p in big.compact(max_part_bytes=int(size / 1.2)).parts] == [100, 1, 20]


def test_large_parts_are_split(filled, filler, codes_of):
    filled.delete("width in (3, 50, 51)")
    store = filler(filled.refresh(), 100, 130)
    store.add_column("n", lambda view: view.rows, dtype="int64", shape=())
    store = store.refresh()
    before = content(store, codes_of)
    store.compact(max_part_bytes=120_000)
    after = store.refresh()
    sizes = [sum(ref.bytes for ref in list_files(part)) for part in after.snapshot.parts]
    assert len(sizes) > 3 and max(sizes) < 1.5 * 120_000 and sum(p.rows for p in after.snapshot.parts) == 127
    assert content(after, codes_of) == before and after.snapshot.deleted is None and after.verify().ok
    rows = after.select().rows
    assert after.tensor("n").gather(rows).tolist() == rows.tolist()
    assert content(store, codes_of) == before
    joined = after.compact()
    assert len(joined.parts) == 1 and content(after.refresh(), codes_of) == before
    assert after.refresh().verify().ok


def test_a_single_row_is_never_split(empty):
    empty.append([{"key": "a", "blob": b"x" * 100_000}, {"key": "b", "blob": b"y" * 100_000}])
    store = empty.refresh()
    assert [part.rows for part in store.compact(max_part_bytes=1000).parts] == [1, 1]
    assert store.compact(max_part_bytes=1000).id == 2
    for size in (0, -1):
        with pytest.raises(StorageError, match="give a size of 1 or more"):
            store.compact(max_part_bytes=size)


def test_sparse_columns_stay_sparse(empty):
    for start in (0, 10):
        with empty.writer(tensors={"x": ("int32", (2,))}) as writer:
            for i in range(start, start + 10):
                writer.add(f"k{i}", tensors={"x": np.full(2, i, np.int32) if i % 3 else None})
    with empty.writer(tensors={"x": ("int32", (2,))}) as writer:
        writer.add("dense", tensors={"x": np.zeros(2, np.int32)})
    empty.refresh().delete("key in ('k1', 'k2')")
    snapshot = empty.compact()
    store = empty.refresh()
    assert [part.rows for part in snapshot.parts] == [18, 1] and store.verify().ok
    column = store.tensor("x")
    has = column.has(store.select().rows)
    assert has.tolist() == [i % 3 > 0 for i in range(20) if i not in (1, 2)] + [True]
    rows = store.select().rows[has]
    assert column.gather(rows)[:, 0].tolist() == [*rows.tolist()[:-1], 0]


def test_everything_deleted(filled):
    filled.delete("true")
    snapshot = filled.compact()
    assert snapshot.parts == () and snapshot.deleted is None and snapshot.next_row == 100
    filled.append([{"key": "k00001"}])
    assert filled.refresh().select().rows.tolist() == [100]


def test_a_key_that_was_deleted_and_written_again(filled, codes_of):
    filled.delete("width = 5")
    with filled.writer(tensors={"codes": ("int16", (8,))}) as writer:
        writer.add("k00005", b"again", {"codes": codes_of(5)}, width=5)
    filled.compact()
    store = filled.refresh()
    assert store.row("k00005") == 100 and store.blob(100) == b"again" and len(store) == 100


def test_conflicts(filled, filler, monkeypatch):
    from storage import compaction

    original = compaction._rewrite

    def race(change):
        def join(*arguments):
            change()
            return original(*arguments)

        monkeypatch.setattr(compaction, "_rewrite", join)

    race(lambda: filler(filled, 100, 105))
    filled.compact()
    assert [p.rows for p in filled.refresh().snapshot.parts] == [100, 5]
    race(lambda: filled.delete("width = 3") and None)
    filled.refresh().compact()
    store = filled.refresh()
    assert len(store) == 104 and store.snapshot.deleted.rows == 1 and len(store.select("width = 3")) == 0
    race(lambda: store.add_column("n", lambda view: np.zeros(len(view)), dtype="float64", shape=()))
    before = store.refresh()
    with pytest.raises(CommitConflictError, match="compact again"):
        before.compact()
    assert before.refresh().verify().ok and len(before.refresh().select()) == 104
