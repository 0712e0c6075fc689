"""Rows of a query: a table when it fits the terminal, records when it would not be readable."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from unirl.cli.rows import print_rows


def printed(table: pa.Table, capsys: pytest.CaptureFixture[str]) -> str:
    print_rows(table, "table")
    return capsys.readouterr().out


def test_few_columns_are_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = printed(pa.table({"key": ["a", "b"], "width": [1, None]}), capsys)
    assert "key" in shown and "│" in shown and shown.endswith("2 rows\n")


def test_many_columns_are_records(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table = pa.table({f"column_{i}": [f"value [{i}] " + "x" * 70] for i in range(30)})
    table = table.append_column("nothing", pa.nulls(1, pa.string()))
    shown = printed(table, capsys)
    assert "│" not in shown
    assert all(f"column_{i}  " in shown and f"value [{i}]" in shown for i in range(30))
    assert "null in all rows: nothing" in shown and shown.endswith("1 row\n")
    assert max(map(len, shown.splitlines())) <= 80


def test_a_wide_terminal_takes_more_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({f"column_{i}": [i] for i in range(12)})
    monkeypatch.setenv("COLUMNS", "80")
    assert "│" not in printed(table, capsys)
    monkeypatch.setenv("COLUMNS", "200")
    assert "│" in printed(table, capsys)


def test_no_rows_still_name_the_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = printed(pa.table({"key": pa.array([], pa.string())}), capsys)
    assert "key" in shown and shown.endswith("0 rows\n")


def test_numbers_that_are_not_finite_are_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(pa.table({"score": [float("nan"), float("inf"), 0.5]}), "json")
    assert [row["score"] for row in json.loads(capsys.readouterr().out)] == [None, None, 0.5]
