"""Tables with one sample a row. The media are in the row or beside the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from datapipe.errors import SourceError
from datapipe.sources.column_kinds import ColumnKinds
from datapipe.sources.compression import strip_compression
from datapipe.sources.fields import FieldMap
from datapipe.sources.media import OpenedMedium
from datapipe.sources.paths import printable
from datapipe.sources.record import MISSING, Item
from datapipe.sources.remote import SourcePath
from datapipe.sources.row import Row
from datapipe.sources.row_record import row_items
from datapipe.sources.rows import check_table, count_rows, observe_table, read_rows

__all__ = ["TableSource"]


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
    ) -> None:
        """Args:
        path: The table.
        fields: Names of key, image and caption.
        key_prefix: Put before every key.
        constants: Columns that every row gets, unless the table has them.

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
        self._stem = PurePosixPath(strip_compression(self.path.name)).stem
        check_table(self.path, self._fields)

    def count(self) -> int | None:
        return count_rows(self.path)

    def observe_columns(self, kinds: ColumnKinds) -> None:
        observe_table(self.path, self._fields, kinds)
        kinds.declare(dict.fromkeys(self._constants, "string"), str(self.path))

    def items(self) -> Iterator[Item]:
        folder = self.path.parent
        for row in read_rows(self.path):
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
