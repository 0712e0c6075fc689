"""Values between Arrow and numpy: what pyarrow itself would make of them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from storage.arrow_numpy import from_list, pick_list


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["a", None, "ü", ""], pa.large_string()),
        ([1, None, -(2**63)], pa.int64()),
        ([2**64 - 1, None], pa.uint64()),
        ([1.5, None, float("inf")], pa.float64()),
        ([True, None, False] * 5, pa.bool_()),
        ([None, None], pa.int64()),
        ([], pa.large_string()),
    ],
)
def test_lists_become_arrays(values: list[str | float | None], kind: pa.DataType) -> None:
    array = from_list(values, kind)
    array.validate(full=True)
    assert array.equals(pa.array(values, kind))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["ab", None, "ü", "", "x" * 300] * 9, pa.large_string()),
        (["a", "bc", "ü"] * 40, pa.large_string()),
        ([1, None, -(2**63)], pa.int64()),
        ([2**64 - 1, 0], pa.uint64()),
        ([1.5, None, float("inf")], pa.float64()),
        ([True, None, False] * 9, pa.bool_()),
        ([None, None, None], pa.large_string()),
        (["", "", ""], pa.large_string()),
    ],
)
@pytest.mark.parametrize("start", [0, 1])
def test_values_are_picked_as_take_does(
    values: list[str | float | None], kind: pa.DataType, start: int
) -> None:
    array = pa.array(values, kind)[start:]
    at = np.random.default_rng(0).integers(0, len(array), 20)
    assert pick_list(array, at) == array.take(pa.array(at)).to_pylist()
    assert pick_list(array, at[:0]) == []
