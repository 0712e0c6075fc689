"""Tables with one sample a row: Parquet, JSON lines, CSV. The picture is in the row or beside the table."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from datapipe.errors import DecodeError, SourceError
from datapipe.sources.column_kinds import ColumnKinds
from datapipe.sources.fields import FieldMap
from datapipe.sources.paths import file_loader, locate_file, printable
from datapipe.sources.record import MISSING, Fault, Item, Note, Record
from datapipe.sources.row import Row
from datapipe.sources.rows import check_table, count_rows, observe_table, read_rows

__all__ = ["TableSource"]

# How JPEG, PNG, GIF, WebP, little- and big-endian TIFF begin in base64. No path of this length begins so.
_BASE64_MAGIC: Final = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "SUkqA", "TU0AK")
_MIN_BASE64_CHARS: Final = 64


class TableSource:
    """One table file.

    The picture of a row is bytes, a path relative to the table, base64 text (bare or as a `data:` URI), or
    the struct {bytes, path} that Hugging Face datasets write. The key is the column `key`, else the table's
    name and the row number, as in `train/00000017`. Rows without a picture are text samples where pictures
    are optional.
    """

    def __init__(
        self,
        path: str | Path,
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
        self.path = Path(path)
        self._fields = fields or FieldMap()
        self._prefix = f"{key_prefix}/" if key_prefix else ""
        self._constants = dict(constants or {})
        if not self.path.is_file():
            raise SourceError(f"{self.path}: no such file")
        self.name = printable(self.path.resolve().as_posix())
        self.base = self.name.rpartition("/")[0]
        check_table(self.path, self._fields)

    def count(self) -> int | None:
        return count_rows(self.path)

    def observe_columns(self, kinds: ColumnKinds) -> None:
        observe_table(self.path, self._fields, kinds)
        kinds.declare(dict.fromkeys(self._constants, "string"), str(self.path))

    def items(self) -> Iterator[Item]:
        for row in read_rows(self.path):
            if isinstance(row, Fault):
                yield row
            else:
                yield from self._from_row(row)

    def _from_row(self, row: Row) -> Iterator[Item]:
        picked = self._fields.pick(row.values)
        key = self._key(picked.key, row)
        try:
            load, notes = _loader(picked.image, self.path.parent, row.place)
        except DecodeError as error:
            yield Fault(key=str(key), place=row.place, reason=error.reason, detail=error.detail)
            return
        yield from notes
        columns = self._constants | picked.columns
        yield Record(key=key, place=row.place, load=load, caption=picked.caption, columns=columns)

    def _key(self, found: object, row: Row) -> object:
        if found is MISSING:
            return f"{self._prefix}{self.path.stem}/{row.number:08d}"
        is_id = isinstance(found, str | int) and not isinstance(found, bool)
        return f"{self._prefix}{found}" if is_id and found != "" else found


def _loader(image: object, folder: Path, place: str) -> tuple[Callable[[], bytes] | None, list[Note]]:
    if image is MISSING or image is None:
        return None, []
    if isinstance(image, Mapping):
        inner = image.get("bytes")
        return _loader(inner if inner is not None else image.get("path"), folder, place)
    if isinstance(image, bytes | bytearray | memoryview):
        data = bytes(image)
        return (lambda: data), []
    if isinstance(image, str):
        encoded = _base64_payload(image)
        if encoded is not None:
            data = _from_base64(encoded)
            return (lambda: data), []
        path, notes = locate_file(folder, image, place)
        return file_loader(path), notes
    kind = type(image).__name__
    raise DecodeError("image_other_type", f"the image is a {kind}; wanted bytes, a path or {{bytes, path}}")


def _base64_payload(text: str) -> str | None:
    """The base64 text of a `data:` URI or of a bare picture; None for a path."""
    if text.startswith("data:"):
        head, _, payload = text.partition(",")
        if not head.endswith(";base64"):
            raise DecodeError("bad_base64", f"{text[:60]!r}: only base64 data URIs hold pictures")
        return payload
    return text if len(text) >= _MIN_BASE64_CHARS and text.startswith(_BASE64_MAGIC) else None


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DecodeError("bad_base64", f"{text[:60]!r}: {error}") from error
