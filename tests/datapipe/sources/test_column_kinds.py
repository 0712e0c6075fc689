"""One type per column, over all values."""

from __future__ import annotations

import pyarrow as pa
import pytest

from datapipe.errors import SourceError
from datapipe.sources.column_kinds import ColumnKinds, kind_of_arrow


def kinds_of(*values: object) -> ColumnKinds:
    kinds = ColumnKinds()
    for index, value in enumerate(values):
        kinds.observe({"x": value}, f"t:{index + 1}")
    return kinds


@pytest.mark.parametrize(
    ("values", "kind", "converted"),
    [
        ([1, None, 2], "int", [1, None, 2]),
        ([1, 0.5], "float", [1.0, 0.5]),
        ([2**53 + 1, 0.5], "string", ["9007199254740993", "0.5"]),
        ([True, False], "bool", [True, False]),
        ([True, 1], "string", ["true", "1"]),
        ([1, "x"], "string", ["1", "x"]),
        ([[], [{"k": 1}]], "string", ["[]", '[{"k": 1}]']),
        ([1, 2**64], "string", ["1", "18446744073709551616"]),
        ([float("nan"), 3], "int", [None, 3]),
        ([None], None, [None]),
    ],
)
def test_union_of_types(values: list[object], kind: str | None, converted: list[object]) -> None:
    kinds = kinds_of(*values)
    assert kinds.kind("x") == kind
    found = [kinds.convert({"x": value})["x"] for value in values]
    assert found == converted and [type(a) for a in found] == [type(b) for b in converted]


def test_a_store_that_has_the_column_decides() -> None:
    kinds = kinds_of(1, 2)
    kinds.fit_store({"x": "DOUBLE"})
    assert kinds.convert({"x": 1}) == {"x": 1.0}
    kinds = kinds_of(1, 2)
    kinds.fit_store({"x": "VARCHAR"})
    assert kinds.convert({"x": 1}) == {"x": "1"}
    with pytest.raises(
        SourceError, match=r"'x' is int in the store, but string in the source .int at t:1, string at t:2"
    ):
        kinds_of(1, "x").fit_store({"x": "BIGINT"})


def test_names_that_differ_only_in_case() -> None:
    kinds = kinds_of(1)
    with pytest.raises(SourceError, match="'x' and 'X' differ only in upper and lower case"):
        kinds.observe({"X": 1}, "t:2")


def test_kinds_of_a_schema() -> None:
    types = {
        "a": pa.int32(),
        "b": pa.uint64(),
        "c": pa.float32(),
        "d": pa.bool_(),
        "e": pa.list_(pa.int8()),
        "f": pa.null(),
    }
    assert kind_of_arrow(pa.schema(types)) == {
        "a": "int",
        "b": "string",
        "c": "float",
        "d": "bool",
        "e": "string",
    }
