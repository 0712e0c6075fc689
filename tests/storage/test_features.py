from __future__ import annotations

import numpy as np
import pytest

from storage import CommitConflictError, DuplicateKeyError, KeyNotFoundError, TensorColumnError


def doubled(view):
    return np.stack([np.full((2, 2), 2 * row, np.float32) for row in view.rows])


def test_a_function_computes_every_row(filled):
    blobs = [part.blobs for part in filled.snapshot.parts]
    snapshot = filled.add_column("f", doubled, dtype="float32", shape=(2, 2), message="features")
    store = filled.refresh()
    assert snapshot.message == "features" and [part.blobs for part in snapshot.parts] == blobs
    assert store.tensor("f").gather(np.array([0, 99, 60]))[:, 0, 0].tolist() == [0, 198, 120]
    assert "f" not in filled.tensor_columns
    assert store.verify().ok


def test_values_come_in_any_order(filled):
    keys = filled.select().keys()
    filled.add_column("n", ((key, np.array([int(key[1:])])) for key in keys[::-1]), dtype="int64", shape=(1,))
    assert filled.refresh().tensor("n").gather(np.arange(100)).ravel().tolist() == list(range(100))


def test_a_store_without_rows(empty):
    with pytest.raises(TensorColumnError, match="no rows yet"):
        empty.add_column("x", iter([]), dtype="f4", shape=())


@pytest.mark.parametrize("pairs", [[5], [("k00000", np.zeros(1), 3)], ["k00000"]])
def test_what_is_no_pair(filled, pairs):
    with pytest.raises(TensorColumnError, match="pair of key and array"):
        filled.add_column("x", pairs, dtype="f8", shape=(1,))


def test_mistakes_publish_nothing(filled):
    one = np.zeros(1, np.int8)
    keys = filled.select().keys()
    every = [(key, one) for key in keys]
    for values, error, text in (
        (every[:-3], TensorColumnError, "3 rows got no value, the first is key 'k00097'"),
        ([*every, every[0]], DuplicateKeyError, "given twice"),
        ([*every, ("nobody", one)], KeyNotFoundError, "nobody"),
        ([(every[0][0], np.zeros(2, np.int8))], TensorColumnError, r"int8\(2,\)"),
        (lambda view: np.zeros((1, 1), np.int8), TensorColumnError, "rows 0 to 99"),
    ):
        with pytest.raises(error, match=text):
            filled.add_column("x", values, dtype="int8", shape=(1,))
    assert filled.refresh().snapshot.id == 2
    assert not list((filled.path / "staging").iterdir())
    with pytest.raises(TensorColumnError, match="has a tensor 'codes' already"):
        filled.add_column("codes", doubled, dtype="int16", shape=(8,))


def test_only_rows_that_lack_it_are_computed(filled, filler):
    filled.append([{"key": "plain"}])
    asked = []

    def compute(view):
        asked.extend(view.rows.tolist())
        return np.zeros((len(view), 8), np.int16)

    filled.add_column("codes", compute, dtype="int16", shape=(8,))
    store = filled.refresh()
    assert asked == [100] and store.tensor("codes").gather(np.array([100, 1])).shape == (2, 8)


def test_another_writer_appends_meanwhile(filled, filler):
    def compute(view):
        if view.rows[0] == 0:
            filler(filled, 100, 105)
        return doubled(view)

    filled.add_column("f", compute, dtype="float32", shape=(2, 2))
    store = filled.refresh()
    assert len(store) == 105 and len(store.tensor("f").gather(np.arange(100))) == 100
    store.add_column("f", doubled, dtype="float32", shape=(2, 2))
    assert store.refresh().tensor("f").gather(np.array([104]))[0, 0, 0] == 208


def test_another_writer_wins_the_same_column(filled):
    def compute(view):
        if view.rows[0] == 0:
            filled.add_column("f", doubled, dtype="float32", shape=(2, 2))
        return doubled(view)

    with pytest.raises(CommitConflictError, match="wrote tensor 'f'"):
        filled.add_column("f", compute, dtype="float32", shape=(2, 2))
    assert filled.refresh().verify().ok
    assert filled.gc(grace_s=0).removed == []
