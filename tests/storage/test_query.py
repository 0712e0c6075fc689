from __future__ import annotations

import gc
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from storage import FeatureStore, QueryError
from storage import query as query_module


def test_select(filled):
    assert filled.select().rows.tolist() == list(range(100))
    assert filled.select("width >= 58 AND split = 'eval'", limit=3).rows.tolist() == [58, 60, 62]
    assert filled.select(order_by="width % 7, width DESC", limit=2).rows.tolist() == [98, 91]
    assert filled.select(order_by="split").rows[:3].tolist() == [0, 2, 4]
    assert filled.select(limit=5).rows.tolist() == [0, 1, 2, 3, 4]
    assert len(filled.select("width < 0")) == 0
    assert len(filled.select("width < 10 -- a comment")) == 10


@pytest.mark.parametrize("where", [None, "true"])
def test_a_negative_limit(filled, where):
    for limit in (-1, -100):
        with pytest.raises(QueryError, match="negative"):
            filled.select(where, limit=limit)
        with pytest.raises(QueryError, match="negative"):
            filled.search("sample", limit=limit)
    assert len(filled.select(where, limit=0)) == 0


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


MINE = {"key": ["k00003", "k00061", "nobody"], "grade": [0.5, 1.5, 2.5], "id": [2**63, 2**64 - 1, 0]}


def mine() -> pa.Table:
    return pa.table({**MINE, "id": pa.array(MINE["id"], pa.uint64())})


def test_a_join_with_a_table_of_the_user(filled, tmp_path):
    pq.write_table(mine(), tmp_path / "mine.parquet")
    feather.write_feather(mine(), tmp_path / "mine.arrow", compression="uncompressed")
    sql = "SELECT row, grade, width, id FROM samples JOIN mine USING (key) ORDER BY row"
    wanted = [
        {"row": 3, "grade": 0.5, "width": 3, "id": 2**63},
        {"row": 61, "grade": 1.5, "width": 61, "id": 2**64 - 1},
    ]
    for table in (mine(), tmp_path / "mine.parquet", str(tmp_path / "mine.arrow"), mine().to_reader()):
        assert filled.query(sql, tables={"mine": table}).to_pylist() == wanted
    columns = {name: MINE[name] for name in ("key", "grade")}
    assert filled.query("SELECT sum(grade) FROM mine", tables={"mine": columns})[0][0].as_py() == 4.5
    view = filled.select('key IN (SELECT key FROM "my list")', tables={"my list": mine()})
    assert view.rows.tolist() == [3, 61]
    ranked = filled.select(
        "key IN (SELECT key FROM mine)",
        order_by="(SELECT -grade FROM mine WHERE mine.key = samples.key)",
        tables={"mine": mine()},
    )
    assert ranked.rows.tolist() == [61, 3]


def test_a_data_frame_is_a_table(filled):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"key": ["k00003"], "code": ["007"]})
    found = filled.query("SELECT code, width FROM samples JOIN frame USING (key)", tables={"frame": frame})
    assert found.to_pylist() == [{"code": "007", "width": 3}]


def test_a_table_is_seen_by_its_query_only(filled):
    assert filled.query("SELECT count(*) FROM mine", tables={"mine": mine()})[0][0].as_py() == 3
    with pytest.raises(QueryError, match="mine"):
        filled.query("SELECT count(*) FROM mine")
    assert filled.query("SELECT max(x) FROM mine", tables={"mine": {"x": [7]}})[0][0].as_py() == 7


def test_tables_that_cannot_be_used(filled, tmp_path):
    (tmp_path / "t.csv").write_text("key\n1\n")
    for name, table, text in (
        ("samples", mine(), "cannot be called 'samples'"),
        ("Deleted_Rows", mine(), "cannot be called"),
        ("", mine(), "cannot be called"),
        ("t", tmp_path / "t.csv", "for CSV and JSON, read the file"),
        ("t", tmp_path / "none.parquet", "none.parquet cannot be read"),
        ("t", 3, "int cannot be read as a table"),
        ("t", {"a": [1], "b": [1, 2]}, "cannot be read as a table"),
    ):
        with pytest.raises(QueryError, match=text):
            filled.query("SELECT 1", tables={name: table})


def test_many_small_parts_are_held_after_a_few_queries(empty, monkeypatch):
    monkeypatch.setattr(query_module, "_MANY_PARTS", 3)
    for i in range(5):
        empty.append([{"key": f"{i}", "n": i, f"only{i}": i * 1.5}])
    empty.delete("n = 1")
    store = empty.refresh()
    for _ in range(query_module._VIEW_RUNS + 2):
        assert store.select("n >= 1").rows.tolist() == [2, 3, 4]
        assert store.query("SELECT only3 FROM samples WHERE n = 3")[0].to_pylist() == [4.5]
        assert store.query("SELECT only3 FROM samples WHERE n = 2")[0].to_pylist() == [None]
    for path in (store.path / "index").glob("*.parquet"):
        path.unlink()
    assert store.select("n >= 1").rows.tolist() == [2, 3, 4]


def test_parts_with_much_text_are_never_held(empty, monkeypatch):
    monkeypatch.setattr(query_module, "_MANY_PARTS", 3)
    for i in range(5):
        empty.append([{"key": f"{i}", "n": i}])
    store = empty.refresh()
    monkeypatch.setattr(
        query_module, "_MAX_TABLE_BYTES", sum(p.index.bytes for p in store.snapshot.parts) - 1
    )
    for _ in range(query_module._VIEW_RUNS + 2):
        assert store.select("n >= 1").rows.tolist() == [1, 2, 3, 4]
    for path in (store.path / "index").glob("*.parquet"):
        path.unlink()
    with pytest.raises(QueryError, match="failed"):
        store.select("n >= 1")


@pytest.mark.slow
def test_a_query_that_needs_more_than_its_memory_goes_through_files(tmp_path, monkeypatch):
    """80 MB of noise in half as much memory; the folder of the files is gone with the store."""
    (tmp_path / "spill").mkdir()
    monkeypatch.setattr(query_module.tempfile, "tempdir", str(tmp_path / "spill"))
    monkeypatch.setitem(query_module._SETTINGS, "memory_limit", "40MB")
    monkeypatch.setitem(query_module._SETTINGS, "threads", 1)
    store, rng, num = FeatureStore.create(tmp_path / "s"), np.random.default_rng(0), 10_000
    for part in range(16):
        noise = [rng.bytes(250).hex() for _ in range(num)]
        with store.writer(message="noise") as writer:
            writer.add_rows([f"{part}/{i}" for i in range(num)], {"noise": noise})
    store = store.refresh()
    assert store.query("SELECT count(DISTINCT noise) FROM samples")[0].to_pylist() == [16 * num]
    assert list((tmp_path / "spill").glob("unirl-query-*"))
    del store
    gc.collect()
    assert not list((tmp_path / "spill").iterdir())


def test_a_view_stays_as_it_is_under_later_commits(filled, filler):
    view = filled.select("split = 'train' AND width < 70", order_by="width DESC")
    rows, keys = view.rows.tolist(), view.keys()
    codes = filled.tensor("codes").gather(view.rows)
    filler(filled, 100, 120)
    filled.delete("width % 3 = 0")
    filled.compact()
    filled.rename_column("caption", "text")
    filled.refresh().drop_column("codes")
    filled.gc(grace_s=0, keep_last=1)
    for same in (view, pickle.loads(pickle.dumps(view))):  # noqa: S301
        assert same.rows.tolist() == rows and same.keys() == keys and same.snapshot_id == 2
        assert same.column("caption").to_pylist() == [f"sample {row}" for row in rows]
        assert np.array_equal(same.store.tensor("codes").gather(same.rows), codes)


def test_folders_named_like_a_column_are_only_folders(tmp_path, filler):
    store = filler(FeatureStore.create(tmp_path / "split=other" / "width=5"), 0, 4)
    assert store.query("SELECT DISTINCT split FROM samples ORDER BY 1")[0].to_pylist() == ["eval", "train"]
    assert store.select("width = 2").rows.tolist() == [2]
