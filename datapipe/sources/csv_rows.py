"""CSV and TSV, row by row, as text. One bad row does not lose the others."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from datapipe.errors import SourceError
from datapipe.sources.record import Fault
from datapipe.sources.row import Row, check_unique_names

if TYPE_CHECKING:
    import _csv

__all__ = ["csv_columns", "read_csv_rows"]

_ERRORS: Final = "surrogateescape"  # bytes that are no UTF-8 arrive as U+DC80..U+DCFF and are found later


def csv_columns(path: Path) -> list[str]:
    """Read the header.

    Raises:
        SourceError: For a file without a header, and for two columns of one name, naming both positions.
    """
    with path.open(encoding="utf-8-sig", errors=_ERRORS, newline="") as file:
        header = next(_reader(file, path), None)
    if not header:
        raise SourceError(f"{path}: the file is empty; wanted a header line with column names")
    for position, name in enumerate(header, start=1):
        if _undecodable(name) is not None:
            raise SourceError(
                f"{path}:1: the name of column {position} is not UTF-8; convert the file to UTF-8"
            )
    check_unique_names(header, str(path))
    return header


def read_csv_rows(path: Path) -> Iterator[Row | Fault]:
    """Yield every data row with all values as strings, so that "007" stays "007".

    Raises:
        SourceError: See csv_columns.
    """
    columns = csv_columns(path)
    with path.open(encoding="utf-8-sig", errors=_ERRORS, newline="") as file:
        reader = _reader(file, path)
        next(reader)
        number = 0
        while True:
            line = reader.line_num + 1
            try:
                values = next(reader, None)
            except csv.Error as error:
                yield _fault(path, line, "bad_csv", f"{error}; rows from here on were not read")
                return
            if values is None:
                return
            if not values:
                continue
            number += 1
            yield _row(path, line, number, columns, values)


def _row(path: Path, line: int, number: int, columns: list[str], values: list[str]) -> Row | Fault:
    if len(values) != len(columns):
        return _fault(
            path, line, "ragged_row", f"found {len(values)} fields, wanted {len(columns)}: {values!r:.120}"
        )
    for name, value in zip(columns, values):
        byte = _undecodable(value)
        if byte is not None:
            detail = f"column {name!r} holds byte 0x{byte:02x}, which is not UTF-8; convert the file to UTF-8"
            return _fault(path, line, "not_utf8", detail)
    return Row(place=f"{path.name}:{line}", number=number, values=dict(zip(columns, values)))


def _reader(file: Iterable[str], path: Path) -> _csv.Reader:
    return csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")


def _undecodable(text: str) -> int | None:
    return next((ord(char) - 0xDC00 for char in text if "\udc80" <= char <= "\udcff"), None)


def _fault(path: Path, line: int, reason: str, detail: str) -> Fault:
    return Fault(key="", place=f"{path.name}:{line}", reason=reason, detail=detail)
