from __future__ import annotations

import numpy as np
import pytest

from storage import FeatureStore, ManifestError, SnapshotNotFoundError, StorageError


def test_log_and_diff(filled):
    filled.add_column("n", lambda view: view.rows, dtype="int64", shape=())
    filled.append([{"key": "x", "extra": 1}])
    filled.refresh().delete("width < 3", message="too small")
    store = filled.refresh()
    assert [s.id for s in store.log()] == [5, 4, 3, 2, 1, 0]
    assert [s.message for s in store.log()][:3] == ["too small", "append", "add column n"]
    diff = store.diff(1, 5)
    assert diff.rows_added.tolist() == list(range(60, 101)) and diff.rows_removed.tolist() == [0, 1, 2]
    assert (diff.columns_added, diff.tensors_added) == (("extra",), ("n",))
    back = store.diff(5, 1)
    assert back.rows_added.tolist() == [0, 1, 2] and back.columns_removed == ("extra",)
    assert store.diff(4, 4).rows_added.size == 0


def test_tags(filled):
    filled.tag("sft")
    filled.tag("first", 1)
    assert filled.tags() == {"first": 1, "sft": 2}
    assert len(filled.at("first")) == 60 and filled.at(0).snapshot.id == 0
    with pytest.raises(StorageError, match="a tag 'sft' already"):
        filled.tag("sft", 1)
    with pytest.raises(SnapshotNotFoundError, match="did you mean 'first'"):
        filled.at("frist")
    with pytest.raises(SnapshotNotFoundError, match="no snapshot 9"):
        filled.tag("x", 9)
    for name in ("", "../x", "a/b", ".x"):
        with pytest.raises(StorageError, match="cannot be used"):
            filled.tag(name)
    filled.untag("first")
    assert filled.tags() == {"sft": 2}
    with pytest.raises(StorageError, match="there are sft"):
        filled.untag("first")
    (filled.path / "tags" / "bad.json").write_bytes(b"{}")
    with pytest.raises(ManifestError, match=r"bad\.json"):
        filled.tags()


def test_a_handle_at_another_snapshot_reads(filled, blob_of, codes_of):
    old = filled.at(1)
    assert old.blob(5) == blob_of(5) and old.select("width = 7").rows.tolist() == [7]
    assert np.array_equal(old.tensor("codes")[5:6][0], codes_of(5))
    assert isinstance(old, FeatureStore) and old.refresh().snapshot.id == 2
