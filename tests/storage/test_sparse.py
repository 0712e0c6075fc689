"""Tensor columns in which rows have no value."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xxhash

from storage import CorruptionError, FeatureStore, ManifestError, RowNotFoundError, TensorColumnError
from storage.manifest_json import encode_snapshot

SOME = [3, 4, 5, 41, 70, 99]


def value(i: int) -> np.ndarray:
    return np.array([i, -i], np.int32)


def add(store: FeatureStore, numbers: list[int], **options: object) -> FeatureStore:
    store.add_column(
        "f",
        [(f"k{i:05d}", value(i)) for i in numbers[::-1]],
        dtype="int32",
        shape=(2,),
        sparse=True,
        **options,
    )
    return store.refresh()


@pytest.fixture
def sparse(filled):
    return add(filled, SOME)


def test_rows_have_a_value_or_not(sparse):
    column = sparse.tensor("f")
    assert column.has(np.array([2, 3, 41, 42, 3])).tolist() == [False, True, True, False, True]
    assert column.present().rows.tolist() == SOME and column.present().keys()[0] == "k00003"
    assert column.gather(np.array([99, 3, 3])).tolist() == [[99, -99], [3, -3], [3, -3]]
    assert column[3:6].tolist() == [[3, -3], [4, -4], [5, -5]]
    assert sparse.tensor("codes").has(np.arange(100)).all() and sparse.verify().ok
    with pytest.raises(RowNotFoundError):
        column.has(np.array([100]))
    assert [part.tensors["f"].rows for part in sparse.snapshot.parts] == [4, 2]


def test_a_row_without_a_value_is_an_error_that_says_what_to_do(sparse):
    for read in (
        lambda column: column.gather(np.array([3, 42])),
        lambda column: column[41:43],
    ):
        with pytest.raises(TensorColumnError, match=r"row 42, key 'k00042', has no tensor 'f'.*fill="):
            read(sparse.tensor("f"))


def test_gather_fills_what_is_missing(sparse):
    out = np.full((4, 2), 9, np.int32)
    column = sparse.tensor("f")
    assert column.gather(np.array([42, 70, 3, 98]), out=out, fill=-1) is out
    assert out.tolist() == [[-1, -1], [70, -70], [3, -3], [-1, -1]]
    assert column.gather(np.array([7, 8]), fill=0).tolist() == [[0, 0], [0, 0]]
    assert sparse.counters.bytes_copied == 2 * 8
    for fill in (0.5, float("nan"), 2**40):
        with pytest.raises(TensorColumnError, match="int32 cannot hold fill="):
            column.gather(np.array([42]), fill=fill)


def test_a_part_without_any_value_lacks_the_column(filled):
    store = add(filled, [70])
    assert ["f" in part.tensors for part in store.snapshot.parts] == [False, True]
    column = store.tensor("f")
    assert column.gather(np.array([0, 70]), fill=0).tolist() == [[0, 0], [70, -70]]
    assert not column.has(np.arange(60)).any()
    with pytest.raises(TensorColumnError, match="row 0, key 'k00000', has no tensor"):
        column[0:2]


def test_more_rows_get_a_value_later(sparse):
    store = add(sparse, [0, 42, 98])
    rows = sorted([*SOME, 0, 42, 98])
    assert store.tensor("f").present().rows.tolist() == rows
    assert store.tensor("f").gather(np.array(rows))[:, 0].tolist() == rows
    assert sparse.tensor("f").present().rows.tolist() == SOME and sparse.refresh().at(3).verify().ok

    def rest(view):
        assert not set(view.rows.tolist()) & set(rows)
        return np.stack([value(row) for row in view.rows])

    store.add_column("f", rest, dtype="int32", shape=(2,))
    store = store.refresh()
    assert store.tensor("f").gather(np.arange(100))[:, 0].tolist() == list(range(100))
    assert all(part.tensors["f"].present is None for part in store.snapshot.parts) and store.verify().ok
    with pytest.raises(TensorColumnError, match="every row has a tensor 'f' already"):
        add(store, [1])


def test_a_function_may_leave_rows_out(filled):
    def even(view):
        has = view.rows % 2 == 0
        return has, np.stack([value(row) for row in view.rows[has]])

    with pytest.raises(TensorColumnError, match="allow it with sparse=True"):
        filled.add_column("f", even, dtype="int32", shape=(2,))
    filled.add_column("f", even, dtype="int32", shape=(2,), sparse=True)
    assert filled.refresh().tensor("f").present().rows.tolist() == list(range(0, 100, 2))
    for bad in (
        lambda view: (np.ones(3, bool), np.zeros((3, 2), np.int32)),
        lambda view: (np.ones(len(view), np.int8), np.zeros((len(view), 2), np.int32)),
        lambda view: (np.ones(len(view), bool), np.zeros((3, 2), np.int32)),
    ):
        with pytest.raises(TensorColumnError, match="rows 0 to 99"):
            filled.add_column("g", bad, dtype="int32", shape=(2,), sparse=True)


def test_nothing_at_all_makes_an_empty_column(filled):
    store = add(filled, [])
    assert len(store.tensor("f").present()) == 0 and store.verify().ok
    assert store.tensor("f").gather(np.array([1]), fill=7).tolist() == [[7, 7]]


def test_compaction_deletion_and_rename_keep_it(sparse):
    sparse.delete("width in (4, 70, 71)")
    sparse.compact()
    sparse.refresh().rename_column("f", "g")
    store = sparse.refresh()
    assert len(store.snapshot.parts) == 1 and store.verify().ok
    column = store.tensor("g")
    assert column.present().rows.tolist() == [3, 5, 41, 99]
    assert column.gather(np.array([99, 5]))[:, 0].tolist() == [99, 5]
    assert sparse.gc(grace_s=0, keep_last=1).removed
    assert FeatureStore.open(store.path).tensor("g").gather(np.array([41]), fill=0)[0, 0] == 41


def test_deleted_rows_need_no_value(filled):
    filled.delete("width = 5")
    store = add(filled, [i for i in range(100) if i != 5])
    assert all(part.tensors["f"].present is None for part in store.snapshot.parts)
    assert store.tensor("f").gather(np.array([4, 6]))[:, 0].tolist() == [4, 6]


def rewrite(store: FeatureStore, change) -> None:
    """Alter the newest snapshot file and give it a right checksum, as an attacker would."""
    path = store.path / "snapshots" / f"{store.snapshot.id:08d}.json"
    fields = json.loads(encode_snapshot(store.snapshot))
    del fields["checksum"]
    change(fields["parts"][0]["tensors"]["f"])
    body = json.dumps(fields).encode()[:-1]
    path.write_bytes(body + b',\n"checksum": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n')


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file["present"].update(rows=3),
        lambda file: file.update(rows=60, present={**file["present"], "rows": 60}),
        lambda file: file["present"].update(path="index/../x"),
        lambda file: file.update(present=[]),
        lambda file: file.update(present=None),
    ],
)
def test_a_hostile_manifest_is_refused(sparse, change):
    rewrite(sparse, change)
    with pytest.raises(ManifestError, match="cannot be used"):
        FeatureStore.open(sparse.path)


def test_damage_in_the_list_of_rows_is_noticed(sparse, tmp_path):
    file = sparse.path / sparse.snapshot.parts[0].tensors["f"].present.path
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()
    file.write_bytes(content)
    sparse.path.rename(tmp_path / "moved")
    store = FeatureStore.open(tmp_path / "moved")
    with pytest.raises(CorruptionError, match=r"\.rows\.arrow: the checksum"):
        store.tensor("f").gather(np.array([3]))
    assert store.tensor("f").gather(np.array([70]))[0, 0] == 70
    assert [problem.path for problem in store.verify().problems] == [
        sparse.snapshot.parts[0].tensors["f"].present.path
    ]
