from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage import CorruptionError, FeatureStore
from storage import index as index_module
from storage import index_file as index_file_module
from storage.index_file import IndexFile


@pytest.fixture
def grouped(empty, monkeypatch):
    """500 rows in five row groups."""
    monkeypatch.setattr(index_module, "_CHUNK_ROWS", 100)
    monkeypatch.setattr(index_module, "_GROUP_ROWS", 100)
    empty.append({"key": f"k{i:03d}", "text": f"text {i}", "n": i} for i in range(500))
    store = empty.refresh()
    with pq.ParquetFile(store.path / store.snapshot.parts[0].index.path) as file:
        assert file.num_row_groups == 5
    return store


@pytest.fixture
def groups_read(monkeypatch):
    """What is read of Parquet files: row groups, or None for whole columns."""
    seen: list[object] = []
    original = IndexFile._read

    def read(self, name, kind, groups):
        seen.append(groups)
        return original(self, name, kind, groups)

    monkeypatch.setattr(IndexFile, "_read", read)
    return seen


def test_a_look_up_by_key_touches_one_row_group(grouped, groups_read):
    view = grouped.select()[[grouped.row("k321")]]
    assert view.to_arrow(["text", "n", "key"]).to_pylist() == [{"text": "text 321", "n": 321, "key": "k321"}]
    assert groups_read == [[3], [3], [3]]
    assert view.column("text").to_pylist() == ["text 321"] and len(groups_read) == 3


def test_rows_of_several_groups(grouped, groups_read):
    rows = np.array([499, 3, 3, 401, 0])
    view = grouped.select()[rows]
    assert view.column("n").to_pylist() == rows.tolist() and groups_read == [[0], [4]]
    assert grouped.select().column("n").to_pylist() == list(range(500)) and groups_read[2:] == [None]
    assert len(grouped.select()[[]].column("n")) == 0


def test_a_column_that_the_part_lacks(grouped):
    grouped.append([{"key": "late", "extra": 1.5}])
    store = grouped.refresh()
    assert store.select("n = 250").column("extra").to_pylist() == [None]
    assert store.select().column("extra").to_pylist()[-2:] == [None, 1.5]


def test_damage_is_named(grouped, tmp_path):
    path = grouped.path / grouped.snapshot.parts[0].index.path
    file = IndexFile(path, "here", 499, "test 1")
    for read in (
        lambda: file.column("n", pa.int64()),
        lambda: file.take("n", pa.int64(), np.array([7])),
    ):
        with pytest.raises(CorruptionError, match="here: 500 rows, the snapshot says 499"):
            read()
    with pytest.raises(CorruptionError, match="here: column 'text' cannot be read"):
        IndexFile(path, "here", 500, "test 2").column("text", pa.int64())
    (tmp_path / "x").write_bytes(b"PAR1 and no more")
    with pytest.raises(CorruptionError, match="here: the file is no Parquet file"):
        IndexFile(tmp_path / "x", "here", 500, "test 3").column("n", pa.int64())
    assert FeatureStore.open(grouped.path).verify().ok


def test_a_small_column_leaves_nothing_in_the_pool_of_arrow(grouped):
    before = pa.total_allocated_bytes()
    held = grouped.part(0).column("text", pa.large_string(), grouped.policy)
    assert pa.total_allocated_bytes() == before
    assert held.to_pylist() == [f"text {i}" for i in range(500)]


def test_a_large_column_is_not_copied(grouped, monkeypatch):
    monkeypatch.setattr(index_file_module, "_SMALL_BYTES", 100)
    before = pa.total_allocated_bytes()
    held = grouped.part(0).column("n", pa.int64(), grouped.policy)
    assert pa.total_allocated_bytes() - before >= held.nbytes
    assert held.to_pylist() == list(range(500))


def test_a_small_column_keeps_its_nulls(empty):
    values = [None if i % 3 else i / 2 for i in range(20)]
    empty.append({"key": f"k{i:02d}", "x": value} for i, value in enumerate(values))
    assert empty.refresh().select().column("x").to_pylist() == values
