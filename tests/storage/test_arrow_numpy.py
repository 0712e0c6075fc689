"""Values between Arrow and numpy: what pyarrow itself would make of them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from storage.arrow_numpy import from_list


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
