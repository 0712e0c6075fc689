from __future__ import annotations

import datetime
import json

import numpy as np
import pyarrow as pa
import pytest

from storage import ColumnError, ColumnTypeError


def column(store, name):
    return store.refresh().select().column(name).to_pylist()


def test_values_survive_as_they_are(empty):
    row = {
        "digits": "007",
        "date": "2020-01-01",
        "big": 2**63 - 1,
        "small": -(2**63),
        "pi": 3.141592653589793,
        "nan": float("nan"),
        "yes": True,
        "empty": "",
        "nul": "x\0y",
        "numpy": np.int32(5),
        "half": np.float32(0.5),
        "flag": np.bool_(False),
    }
    empty.append([{"key": "a", **row}])
    found = empty.refresh().select().to_arrow(list(row)).to_pylist()[0]
    assert np.isnan(found.pop("nan")) and np.isnan(row.pop("nan"))
    assert found == row
    sql = empty.refresh().query("SELECT digits, date, big, small, nul FROM samples").to_pylist()[0]
    assert sql == {name: row[name] for name in sql}


def test_other_values_are_json_text(empty):
    values = [{"a": [1, None]}, [1, "é"], 2**64 - 1, {"deep": {"x": 1.5}}]
    empty.append({"key": str(i), "meta": value, "more": value} for i, value in enumerate(values))
    assert [json.loads(text) for text in column(empty, "meta")] == values
    empty.append([{"key": "text", "meta": "plain"}, {"key": "none", "meta": None}])
    assert column(empty, "meta")[-2:] == ['"plain"', None]
    got = empty.refresh().query("SELECT meta->>'$.deep.x' AS x FROM samples WHERE key = '3'")
    assert got.column(0).to_pylist() == ["1.5"]


def test_ids_beyond_int64_need_a_declared_column(empty):
    with empty.writer(columns={"id": "json"}) as writer:
        writer.add("a", id=1)
        writer.add("b", id=18446744073709551615)
    assert column(empty, "id") == ["1", "18446744073709551615"]


def test_columns_may_come_late_and_be_missing(empty):
    empty.append([{"key": "a", "x": 1}, {"key": "b", "y": "t"}])
    empty.append([{"key": "c", "z": 0.5, "x": 3}])
    empty.append([{"key": "d"}])
    store = empty.refresh()
    assert column(store, "x") == [1, None, 3, None]
    assert column(store, "y") == [None, "t", None, None]
    assert column(store, "z") == [None, None, 0.5, None]
    assert store.query("SELECT sum(x), max(z), count(y) FROM samples").to_pylist()[0] == {
        "sum(x)": 4,
        "max(z)": 0.5,
        "count(y)": 1,
    }


def test_a_column_of_nulls_takes_its_type_later(empty):
    empty.append([{"key": "a", "m": None}])
    store = empty.refresh()
    assert store.columns["m"] == "VARCHAR" and len(store.select("m IS NULL")) == 1
    assert column(store, "m") == [None]
    empty.append([{"key": "b", "m": 4}])
    store = empty.refresh()
    assert store.columns["m"] == "BIGINT" and column(store, "m") == [None, 4]
    assert store.select("m > 3").keys() == ["b"]


def test_a_conflict_names_column_types_and_places(empty):
    with pytest.raises(
        ColumnTypeError, match=r"row 1 of the commit, key 'b'.*'n' is string \('x'\), but int since row 0"
    ):
        empty.append([{"key": "a", "n": 1}, {"key": "b", "n": "x"}])
    first = empty.append([{"key": "a", "n": 1}])
    with pytest.raises(
        TypeError, match=rf"'n' is float \(0.5\), but int since part {first.parts[0].id} \(row 0\)"
    ):
        empty.append([{"key": "b", "n": 0.5}])
    with pytest.raises(ColumnTypeError, match="bool"):
        empty.append([{"key": "b", "n": True}])


def test_whole_numbers_fit_a_float_column_when_exact(empty):
    with empty.writer(columns={"r": "float"}) as writer:
        writer.add("a", r=1)
        writer.add("b", r=2**53)
        with pytest.raises(ColumnTypeError):
            writer.add("c", r=2**53 + 1)
    assert column(empty, "r") == [1.0, 2.0**53]


def test_names(empty):
    for name in ("hash", "bytes", "row", "ROW", "file_row_number", "", "a\0b"):
        with pytest.raises(ColumnError, match="cannot be used"):
            empty.append([{"key": "a", name: 1}])
    with pytest.raises(ColumnError, match="differ only in case"):
        empty.append([{"key": "a", "Caption": "x", "caption": "y"}])
    with pytest.raises(ColumnTypeError, match="none of string"):
        empty.writer(columns={"x": "datetime"})
    odd = {"reward/vlm": 1.0, 'a"b': 2, "select": 3, "é ü": 4, "filename": "f", "a.b": 5, "x'y": 6}
    empty.append([{"key": "a", **odd}])
    store = empty.refresh()
    assert store.query("SELECT * FROM samples").to_pylist()[0].items() >= odd.items()
    assert len(store.select('"reward/vlm" = 1 AND "select" = 3 AND filename = \'f\'')) == 1


def test_a_name_that_is_no_text(empty, filled):
    with empty.writer() as writer:
        with pytest.raises(ColumnError, match="not valid UTF-8"):
            writer.add("a", **{"\ud800": 1})
        writer.add("a", x=1)
    with pytest.raises(ColumnError, match="not valid UTF-8"):
        filled.rename_column("width", "\ud800")


def test_values_nested_too_deep(empty):
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with empty.writer() as writer, pytest.raises(ColumnTypeError, match="no JSON form"):
        writer.add("a", x=deep)


def test_what_has_no_form(empty):
    for value in (datetime.date(2020, 1, 1), b"bytes", object(), "\ud800", {"a": {1, 2}}):
        with pytest.raises(ColumnTypeError, match="column 'v'"):
            empty.append([{"key": "a", "v": value}])
    with pytest.raises(ColumnError, match="did you mean 'caption'"):
        empty.append([{"key": "a", "caption": "x"}])
        empty.refresh().select().column("captoin")


def test_many_rows_go_through_several_chunks(empty):
    with empty.writer() as writer:
        for i in range(40_000):
            extra = {"late": i} if i > 30_000 else {}
            writer.add(f"key-{i}", text=f"text {i}", **extra)
    store = empty.refresh()
    view = store.select("late IS NOT NULL")
    assert view.rows.tolist() == list(range(30_001, 40_000))
    assert view.column("text")[-1].as_py() == "text 39999"
    assert store.row("key-31234") == 31234 and store.row("key-17") == 17


def test_string_columns_use_64_bit_offsets(empty):
    empty.append([{"key": "a", "caption": "x"}])
    assert empty.refresh().select().column("caption").type == pa.large_string()
