"""What a slice comes to, as a row that Ray Data hands from the process that made it to the driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from datapipe.outcomes import SourceProgress
from datapipe.tally import Tally
from storage import SealedPart

__all__ = ["SliceReceipt"]

_SCHEMA: Final = pa.schema(
    [
        ("slice", pa.int64()),
        ("error", pa.string()),
        ("sealed", pa.string()),  # JSON
        ("tally", pa.string()),  # JSON
        ("num_samples", pa.int64()),
        ("num_bad", pa.int64()),
        ("keys", pa.large_list(pa.string())),
        ("places", pa.large_list(pa.string())),
        ("key_ids", pa.large_list(pa.uint64())),
        ("contents", pa.large_list(pa.uint64())),
    ]
)


def _no_texts() -> pa.Array:
    return pa.array([], pa.string())


def _no_ids() -> NDArray[np.uint64]:
    return np.empty(0, np.uint64)


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceReceipt:
    """A sealed part, what was counted, and the keys by which rows are found that two slices have both."""

    slice_number: int
    error: str = ""  # why there is no part
    sealed: SealedPart | None = None
    tally: Tally = field(default_factory=Tally)
    progress: SourceProgress = field(default_factory=SourceProgress)
    keys: pa.Array = field(default_factory=_no_texts)  # string (R,), of the rows of the part
    places: pa.Array = field(default_factory=_no_texts)  # string (R,)
    key_ids: NDArray[np.uint64] = field(default_factory=_no_ids)  # (R,)
    contents: NDArray[np.uint64] = field(default_factory=_no_ids)  # (R,), 0: is like no other

    @classmethod
    def of_part(
        cls,
        slice_number: int,
        sealed: SealedPart,
        tally: Tally,
        progress: SourceProgress,
        *,
        keys: Sequence[str],
        places: Sequence[str],
        key_ids: Sequence[int],
        contents: Sequence[int],
    ) -> SliceReceipt:
        """Of a slice whose part is sealed."""
        return cls(
            slice_number=slice_number,
            sealed=sealed,
            tally=tally,
            progress=progress,
            keys=pa.array(keys, pa.string()),
            places=pa.array(places, pa.string()),
            key_ids=np.array(key_ids, np.uint64),
            contents=np.array(contents, np.uint64),
        )

    def to_table(self) -> pa.Table:
        """One row."""
        values = [
            self.slice_number,
            self.error,
            None if self.sealed is None else self.sealed.to_json(),
            self.tally.to_json(),
            self.progress.num_samples,
            self.progress.num_bad,
        ]
        arrays = [pa.array([value], kind.type) for value, kind in zip(values, _SCHEMA)]
        for column in (self.keys, self.places, pa.array(self.key_ids), pa.array(self.contents)):
            arrays.append(pa.LargeListArray.from_arrays(pa.array([0, len(column)], pa.int64()), column))
        return pa.Table.from_arrays(arrays, schema=_SCHEMA)

    @classmethod
    def from_table(cls, table: pa.Table) -> list[SliceReceipt]:
        """All rows of a table."""
        return [cls._from_row(table.slice(row, 1)) for row in range(len(table))]

    @classmethod
    def _from_row(cls, row: pa.Table) -> SliceReceipt:
        one = {name: row.column(name)[0] for name in row.column_names}
        sealed = one["sealed"].as_py()
        return cls(
            slice_number=one["slice"].as_py(),
            error=one["error"].as_py(),
            sealed=None if sealed is None else SealedPart.from_json(sealed),
            tally=Tally.from_json(one["tally"].as_py()),
            progress=SourceProgress(one["num_samples"].as_py(), one["num_bad"].as_py()),
            keys=one["keys"].values,
            places=one["places"].values,
            key_ids=one["key_ids"].values.to_numpy(zero_copy_only=False),
            contents=one["contents"].values.to_numpy(zero_copy_only=False),
        )
