from __future__ import annotations

import pytest

from storage import ColumnError, FeatureStore, TensorColumnError


def test_drop_a_metadata_column(filled, blob_of):
    snapshot = filled.drop_column("width")
    store = filled.refresh()
    assert snapshot.message == "drop column width" and "width" not in store.columns
    assert store.verify().ok and store.blob(70) == blob_of(70) and store.key(70) == "k00070"
    assert store.select("caption = 'sample 61'").column("split").to_pylist() == ["train"]
    with pytest.raises(ColumnError, match="no column 'width'"):
        store.select().column("width")
    assert filled.select("width = 3").rows.tolist() == [3]
    store.append([{"key": "new", "width": "wide"}])
    assert store.refresh().select().column("width").to_pylist()[-2:] == [None, "wide"]
    assert FeatureStore.open(filled.path, snapshot=2).verify().ok


def test_rename_a_metadata_column(filled):
    filled.append([{"key": "plain"}])
    filled.rename_column("caption", "Caption")
    store = filled.refresh()
    store.rename_column("Caption", "text")
    store = store.refresh()
    assert store.select("text = 'sample 61'").rows.tolist() == [61]
    assert store.select().column("text").to_pylist()[::50] == ["sample 0", "sample 50", None]
    assert list(store.snapshot.columns) == ["text", "width", "split", "score"] and store.verify().ok


def test_tensor_columns(filled, codes_of):
    filled.rename_column("codes", "tokens")
    store = filled.refresh()
    assert (store.tensor("tokens")[3:4][0] == codes_of(3)).all() and store.verify().ok
    with pytest.raises(TensorColumnError):
        store.tensor("codes")
    store.drop_column("tokens")
    assert store.refresh().tensor_columns == {} and store.refresh().verify().ok
    store.add_column("tokens", lambda view: view.rows, dtype="int64", shape=())
    assert store.refresh().tensor("tokens").gather(store.select().rows)[99] == 99


def test_names_are_checked(filled):
    for name, new_name, text in (
        ("nothing", "x", "no column 'nothing' to change; there are caption"),
        ("caption", "width", "'width' already"),
        ("caption", "WIDTH", "only in case"),
        ("caption", "row", "cannot be used"),
        ("key", "name", "no column 'key'"),
    ):
        with pytest.raises(ColumnError, match=text):
            filled.rename_column(name, new_name)
    with pytest.raises(TensorColumnError, match="cannot be used"):
        filled.rename_column("codes", "../x")
    with pytest.raises(ColumnError):
        filled.drop_column("nothing")
    assert filled.refresh().snapshot.id == 2 and filled.gc(grace_s=0).removed == []


def test_another_writer_appends_meanwhile(filled, filler, monkeypatch):
    from storage import schema_change

    original = schema_change._rewrite_index

    def rewrite(*arguments):
        monkeypatch.setattr(schema_change, "_rewrite_index", original)
        filler(filled, 100, 110)
        return original(*arguments)

    monkeypatch.setattr(schema_change, "_rewrite_index", rewrite)
    filled.rename_column("width", "w")
    store = filled.refresh()
    assert len(store.select("w >= 0")) == 110 and "width" not in store.columns and store.verify().ok


def test_deleted_and_compacted_rows(filled):
    filled.delete("width < 50")
    filled.compact()
    filled.rename_column("width", "w")
    filled.drop_column("score")
    store = filled.refresh()
    assert store.select("w = 61").rows.tolist() == [61] and len(store.select()) == 50
    store.delete("w % 2 = 0")
    store.compact()
    assert store.refresh().select("w < 55").keys() == ["k00051", "k00053"]
