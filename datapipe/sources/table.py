"""Tables with one sample a row. The media are in the row or beside the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final

from datapipe.errors import SourceError
from datapipe.sources.arrow_rows import Batch, rows_of_batch
from datapipe.sources.column_kinds import ColumnKinds
from datapipe.sources.compression import strip_compression
from datapipe.sources.fields import FieldMap
from datapipe.sources.media import OpenedMedium
from datapipe.sources.paths import printable
from datapipe.sources.record import MISSING, Fault, Item, Note, TextRows
from datapipe.sources.remote import SourcePath
from datapipe.sources.row import Row
from datapipe.sources.row_record import row_items
from datapipe.sources.rows import (
    check_table,
    count_rows,
    observe_table,
    read_batches,
    read_rows,
    table_schema,
)

__all__ = ["TableSource"]

_PROMPT: Final = frozenset({"image"})


class TableSource:
    """One table file.

    The picture of a row is bytes, a path relative to the table, base64 text (bare or as a `data:` URI), or
    the struct {bytes, path} that Hugging Face datasets write. The key is the column `key`, else the table's
    name and the row number, as in `train/00000017`. Rows without a picture are text samples where pictures
    are optional. Conversations and preference pairs are told by their columns.
    """

    def __init__(
        self,
        path: str | SourcePath,
        *,
        fields: FieldMap | None = None,
        key_prefix: str | None = None,
        constants: Mapping[str, str] | None = None,
        stem: str | None = None,
    ) -> None:
        """Args:
        path: The table.
        fields: Names of key, image and caption.
        key_prefix: Put before every key.
        constants: Columns that every row gets, unless the table has them.
        stem: Stands before the number in keys; None for the table's name without its suffix.

        Raises:
            SourceError: If the head of the table tells that it cannot be used.
        """
        self.path: SourcePath = Path(path) if isinstance(path, str) else path
        self._fields = fields or FieldMap()
        self._prefix = f"{key_prefix}/" if key_prefix else ""
        self._constants = dict(constants or {})
        if not self.path.is_file():
            raise SourceError(f"{self.path}: no such file")
        self.name = printable(self.path.resolve().as_posix())
        self.base = self.name.rpartition("/")[0]
        self._stem = stem or PurePosixPath(strip_compression(self.path.name)).stem
        check_table(self.path, self._fields)

    def count(self) -> int | None:
        return count_rows(self.path)

    def observe_columns(self, kinds: ColumnKinds) -> None:
        observe_table(self.path, self._fields, kinds)
        kinds.declare(dict.fromkeys(self._constants, "string"), str(self.path))

    def items(self) -> Iterator[Item | TextRows]:
        schema = table_schema(self.path)
        text = None if schema is None else self._fields.text_columns(schema.names)
        batches = None if text is None else read_batches(self.path)
        if text is None or batches is None:
            yield from self._from_rows(read_rows(self.path))
            return
        for batch in batches:
            if isinstance(batch, Fault):
                yield batch
                continue
            rows = self._text_rows(batch, *text)
            if rows is None:
                yield from self._from_rows(rows_of_batch(batch.batch, self.path, batch.number))
            else:
                yield rows

    def _text_rows(self, batch: Batch, key: str | None, caption: str | None) -> TextRows | None:
        """The rows of a batch at once; None when one of them needs a closer look."""
        names, numbers = (
            batch.batch.schema.names,
            range(batch.number + 1, batch.number + len(batch.batch) + 1),
        )
        try:
            cells = {name: column.to_pylist() for name, column in zip(names, batch.batch.columns)}
        except (ValueError, OverflowError):
            return None  # text that is not UTF-8, or a date that Python does not know
        found = [MISSING] * len(batch.batch) if key is None else cells[key]
        constants = {name: [value] * len(batch.batch) for name, value in self._constants.items()}
        wanted = self._fields.user_columns(names)
        return TextRows(
            keys=[self._key(number, value, ()) for number, value in zip(numbers, found)],
            places=[f"{self.path.name}#{number}" for number in numbers],
            captions=[MISSING] * len(batch.batch) if caption is None else cells[caption],
            columns=constants | {ours: cells[theirs] for ours, theirs in wanted.items()},
            optional=_PROMPT if self._fields.is_text_only else frozenset(),
        )

    def _from_rows(self, rows: Iterable[Row | Fault | Note]) -> Iterator[Item]:
        folder = self.path.parent
        for row in rows:
            if not isinstance(row, Row):
                yield row
                continue
            yield from row_items(
                row,
                self._fields,
                folder=folder,
                key_of=partial(self._key, row.number),
                constants=self._constants,
                is_prompt=self._fields.is_text_only,
            )

    def _key(self, number: int, found: object, media: Sequence[OpenedMedium]) -> object:
        if found is MISSING:
            return f"{self._prefix}{self._stem}/{number:08d}"
        is_id = isinstance(found, str | int) and not isinstance(found, bool)
        return f"{self._prefix}{found}" if is_id and found != "" else found
