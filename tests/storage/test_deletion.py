from __future__ import annotations

import numpy as np
import pytest

from storage import DuplicateKeyError, FeatureStore, KeyNotFoundError, RowNotFoundError


def test_deleted_rows_are_gone_everywhere(filled, blob_of):
    snapshot = filled.delete("width % 10 = 3")
    store = filled.refresh()
    assert snapshot.num_rows == len(store) == 90 and snapshot.message == "delete 10 rows"
    assert len(store.select()) == len(store.select("width >= 0")) == 90
    assert store.query("SELECT count(*), min(row) FROM samples WHERE width % 10 = 3").to_pylist()[0] == {
        "count_star()": 0,
        'min("row")': None,
    }
    for read in (
        lambda: store.key(13),
        lambda: store.blob(63),
        lambda: store.tensor("codes")[10:20],
        lambda: store.tensor("codes").gather(np.array([1, 13])),
        lambda: filled.select("width = 13") and store.row_map.locate(np.array([13])),
    ):
        with pytest.raises(RowNotFoundError, match="deleted"):
            read()
    with pytest.raises(KeyNotFoundError):
        store.row("k00013")
    assert filled.blob(13) == blob_of(13) and len(filled.select()) == 100
    assert store.blob(14) == blob_of(14) and store.tensor("codes")[14:20].shape == (6, 8)
    assert store.verify().ok and FeatureStore.open(filled.path, verify="always").row("k00014") == 14


def test_a_deleted_key_may_come_back_under_a_new_number(filled):
    filled.delete(filled.select("key = 'k00013'"))
    filled.append([{"key": "k00013", "blob": b"new", "width": -1}])
    store = filled.refresh()
    assert store.row("k00013") == 100 and store.blob(100) == b"new"
    with pytest.raises(DuplicateKeyError):
        store.append([{"key": "k00013"}])
    assert store.select("width = -1").keys() == ["k00013"]


def test_deleting_twice_or_nothing(filled):
    filled.delete("width < 5")
    filled.delete(filled.select("width < 8"))
    store = filled.refresh()
    assert store.select().rows[0] == 8 and len(store) == 92
    assert store.delete("width < 0").num_rows == 92
    store.delete("true")
    assert len(store.refresh()) == 0 and len(store.refresh().select()) == 0
    assert store.refresh().query("SELECT count(*) FROM samples").column(0).to_pylist() == [0]


def test_delete_races_with_append_and_delete(filled):
    with filled.writer() as writer:
        writer.add("k00001x")
        filled.delete("width = 1")
        writer.add("later")
    store = filled.refresh()
    assert len(store) == 101
    with store.writer() as writer, pytest.raises(DuplicateKeyError):
        writer.add("later")
    with filled.writer() as writer:
        filled.append([{"key": "short"}])
        filled.refresh().delete("key = 'short'")
        writer.add("short")
    assert filled.refresh().row("short") == 103


def test_columns_are_computed_for_live_rows_only(filled):
    filled.delete("width % 2 = 0")
    asked = []

    def compute(view):
        asked.extend(view.rows.tolist())
        return view.rows

    filled.add_column("n", compute, dtype="int64", shape=())
    store = filled.refresh()
    assert asked == list(range(1, 100, 2))
    assert store.tensor("n").gather(np.array([1, 99])).tolist() == [1, 99]
    keys = store.select().keys()
    store.add_column("m", ((key, np.array(int(key[1:]))) for key in keys), dtype="int64", shape=())
    assert store.refresh().tensor("m").gather(np.array([51])).tolist() == [51]


def test_restore_brings_deleted_rows_back(filled):
    filled.delete("true")
    filled.restore(2)
    assert len(filled.refresh().select()) == 100
