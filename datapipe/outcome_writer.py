"""Writing what an ingest found out: rows in blocks, which cost the store less than one by one."""

from __future__ import annotations

from typing import Final

from datapipe.judge import Row
from datapipe.judge_texts import TextColumns
from datapipe.media_rules import MediaRules
from datapipe.outcomes import Outcome, Resolved
from datapipe.sources import Fault
from storage import PartWriter

__all__ = ["OutcomeWriter"]

_BLOCK_ROWS: Final = 256
_BLOCK_BYTES: Final = 4 << 20


class OutcomeWriter:
    """Hands outcomes to the writer of a commit, in their order. `flush` hands over the last ones."""

    def __init__(self, writer: PartWriter, media: MediaRules) -> None:
        """Args:
        writer: In its `with` block.
        media: Names the tensors of a row.
        """
        self._writer = writer
        self._tensor_names = [rule.name for rule in media.tensors]
        self._rows: list[Row] = []
        self._num_bytes = 0

    def write(self, outcome: Outcome) -> None:
        """Take a row or a block of texts, or record a fault or that one is settled."""
        result = outcome.result
        if isinstance(result, Row):
            self._add(result)
        elif isinstance(result, TextColumns):
            self.flush()
            self._writer.add_rows(result.keys, result.columns)
        elif isinstance(result, Resolved):
            self._writer.resolve(result.place)
        elif isinstance(result, Fault):
            self._writer.quarantine(
                key=result.key,
                place=outcome.full_place,
                reason=f"{result.reason}: {result.detail}",
                data=result.data,
            )

    def flush(self) -> None:
        """Hand over the rows that wait for their block to be full."""
        rows, self._rows, self._num_bytes = self._rows, [], 0
        if not rows:
            return
        columns = [row.index_columns() for row in rows]
        names = dict.fromkeys(name for each in columns for name in each)
        self._writer.add_rows(
            [row.key for row in rows],
            {name: [each.get(name) for each in columns] for name in names},
            [row.blob for row in rows],
        )

    def _add(self, row: Row) -> None:
        if self._tensor_names:
            made = {} if row.media is None else row.media.tensors
            tensors = {name: made.get(name) for name in self._tensor_names}
            self._writer.add(row.key, row.blob, tensors, **row.index_columns())
            return
        self._rows.append(row)
        self._num_bytes += len(row.blob or b"")
        if len(self._rows) >= _BLOCK_ROWS or self._num_bytes >= _BLOCK_BYTES:
            self.flush()
