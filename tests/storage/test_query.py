from __future__ import annotations

import pyarrow as pa
import pytest

from storage import FeatureStore, QueryError


def test_select(filled):
    assert filled.select().rows.tolist() == list(range(100))
    assert filled.select("width >= 58 AND split = 'eval'", limit=3).rows.tolist() == [58, 60, 62]
    assert filled.select(order_by="width % 7, width DESC", limit=2).rows.tolist() == [98, 91]
    assert filled.select(order_by="split").rows[:3].tolist() == [0, 2, 4]
    assert filled.select(limit=5).rows.tolist() == [0, 1, 2, 3, 4]
    assert len(filled.select("width < 0")) == 0
    assert len(filled.select("width < 10 -- a comment")) == 10


def test_query(filled):
    table = filled.query(
        "SELECT split, count(*) AS n, max(row) AS last FROM samples GROUP BY split ORDER BY split"
    )
    assert table.to_pylist() == [
        {"split": "eval", "n": 50, "last": 98},
        {"split": "train", "n": 50, "last": 99},
    ]
    assert filled.columns["row"] == "BIGINT" and filled.columns["score"] == "DOUBLE"


def test_an_empty_store_can_be_queried(empty):
    assert empty.query("SELECT count(*) FROM samples").column(0).to_pylist() == [0]
    assert len(empty.select("key = 'x'")) == 0 and len(empty.select()) == 0
    assert empty.select().to_arrow().num_rows == 0


@pytest.mark.parametrize(
    "sql",
    [
        "COPY samples TO 'out.csv'",
        "COPY (SELECT 1) TO 'out.parquet' (FORMAT parquet)",
        "CREATE TABLE t AS SELECT 1",
        "SELECT 1; SELECT 2",
        "ATTACH 'x.db'",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "PRAGMA database_list",
        "EXPLAIN ANALYZE SELECT 1",
        "",
        "DROP VIEW samples",
        "EXPORT DATABASE 'd'",
        "CALL pragma_version()",
    ],
)
def test_only_one_select_passes(filled, sql, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(QueryError, match=r"SELECT|failed"):
        filled.query(sql)
    assert sorted(tmp_path.rglob("*")) == before
    assert len(filled.select("width = 1")) == 1


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM read_blob('{store}/snapshots/00000000.json')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM read_parquet('https://example.org/x.parquet')",
    ],
)
def test_nothing_else_can_be_read(filled, sql):
    with pytest.raises(QueryError, match="failed"):
        filled.query(sql.format(store=filled.path))


def test_a_filter_cannot_leave_its_place(filled):
    for where in ("true); COPY samples TO 'x.csv'; --", "width", "no_such_column = 1", "width ="):
        with pytest.raises(QueryError):
            filled.select(where) if where != "width" else filled.select("caption + 1")
    with pytest.raises(QueryError, match="columns: caption, width, split, score"):
        filled.select("wdth > 3")


def test_paths_with_quotes(tmp_path, filler):
    store = filler(FeatureStore.create(tmp_path / "it's [a] *store* {x}"), 0, 3)
    assert store.select("width > 0").rows.tolist() == [1, 2]
    assert store.select().column("caption").to_pylist() == ["sample 0", "sample 1", "sample 2"]


def test_columns_without_any_value(empty):
    with empty.writer(columns={"score": "float", "name": "string"}) as writer:
        writer.add("a", name="x")
    store = empty.refresh()
    assert store.columns["score"] == "DOUBLE" and store.select("score IS NULL").keys() == ["a"]
    assert store.select().column("score").to_pylist() == [None]


def test_columns_of_parts_that_are_gone(filled):
    filled.delete("true")
    filled.append([{"key": "plain"}])
    filled.compact()
    store = filled.refresh()
    assert store.select("width IS NULL AND caption IS NULL").keys() == ["plain"]
    assert store.select().to_arrow(["width", "caption"]).to_pylist() == [{"width": None, "caption": None}]


def test_a_query_cannot_read_variables_of_the_program(filled):
    secret = pa.table({"x": [1]})
    with pytest.raises(QueryError, match="secret"):
        filled.query("SELECT * FROM secret")
    assert secret.num_rows == 1
