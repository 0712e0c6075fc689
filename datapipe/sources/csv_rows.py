"""CSV and TSV, row by row, as text. One bad row does not lose the others.

A .tsv has tabs. Of a .csv whose header has no comma, the separator is a semicolon, a tab or a bar if the
header has one: spreadsheets of many countries write semicolons, and some say so in a first line `sep=;`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TextIO

from datapipe.errors import SourceError
from datapipe.sources.compression import DAMAGE, strip_compression
from datapipe.sources.record import Fault
from datapipe.sources.remote import SourcePath
from datapipe.sources.row import Row, check_unique_names
from datapipe.sources.text_file import open_text, undecodable_byte

if TYPE_CHECKING:
    import _csv

__all__ = ["csv_columns", "read_csv_rows"]

_OTHER_SEPARATORS: Final = ";\t|"
_SEPARATOR_LINE: Final = "sep="
_NO_TABLE: Final = ("<", "PK\x03\x04", "PAR1", "ARROW1", "%PDF")  # begin a web page, a workbook, ...
_MAX_FIELD_CHARS: Final = 64 * 2**20  # a picture in base64 fits


def csv_columns(path: SourcePath) -> list[str]:
    """Read the header.

    Raises:
        SourceError: For a file without a header, one in UTF-16 or that is no text table at all, and for two
            columns of one name, naming both positions.
    """
    try:
        with open_text(path) as file:
            header = _next(_reader(_Lines(file), path))
    except (csv.Error, *DAMAGE) as error:
        raise SourceError(f"{path}:1: the header cannot be read: {error}") from error
    if not header:
        raise SourceError(f"{path}: the file is empty; wanted a header line with column names")
    if header[0].lstrip().startswith(_NO_TABLE):
        raise SourceError(
            f"{path}: begins with {header[0].strip()[:20]!r}, as no CSV file does; wanted a header line with "
            "column names: export or download the table again"
        )
    for position, name in enumerate(header, start=1):
        if undecodable_byte(name) is not None:
            raise SourceError(
                f"{path}:1: the name of column {position} is not UTF-8; convert the file to UTF-8"
            )
    check_unique_names(header, str(path))
    return header


def read_csv_rows(path: SourcePath) -> Iterator[Row | Fault]:
    """Yield every data row with all values as strings, so that "007" stays "007".

    Raises:
        SourceError: See csv_columns.
    """
    columns = csv_columns(path)
    with open_text(path) as file:
        lines = _Lines(file)
        reader = _reader(lines, path)
        _next(reader)
        number = 0
        while True:
            line = lines.num_before + reader.line_num + 1
            try:
                values = _next(reader)
                if values and lines.is_over:
                    raise csv.Error("a quote is not closed before the end of the file")
            except (csv.Error, *DAMAGE) as error:
                yield _fault(path, line, "bad_csv", f"{error}; rows from here on were not read")
                return
            if values is None:
                return
            if not values:
                continue
            number += 1
            yield _row(path, line, number, columns, values)


def _row(path: SourcePath, line: int, number: int, columns: list[str], values: list[str]) -> Row | Fault:
    if len(values) != len(columns):
        return _fault(
            path, line, "ragged_row", f"found {len(values)} fields, wanted {len(columns)}: {values!r:.120}"
        )
    for name, value in zip(columns, values):
        byte = None if value.isascii() else undecodable_byte(value)
        if byte is not None:
            detail = f"column {name!r} holds byte 0x{byte:02x}, which is not UTF-8; convert the file to UTF-8"
            return _fault(path, line, "not_utf8", detail)
    return Row(place=f"{path.name}:{line}", number=number, values=dict(zip(columns, values)))


class _Lines:
    """Lines of bounded length. `is_over` once more was asked for than there is."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._header: str | None = None  # read ahead
        self.is_over = False
        self.num_before = 0  # lines before the header

    def header(self) -> tuple[str, str | None]:
        """The first line that is not blank, which comes again as the first, and a declared separator."""
        line, separator = next(self, ""), None
        while line and (not line.strip() or _is_separator_line(line)):
            separator = line[len(_SEPARATOR_LINE)] if line.strip() else separator
            self.num_before += 1
            line = next(self, "")
        self._header = line
        self.is_over = False
        return line, separator

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line, self._header = self._header or self._file.readline(_MAX_FIELD_CHARS), None
        if not line:
            self.is_over = True
            raise StopIteration
        if len(line) == _MAX_FIELD_CHARS and line[-1] not in "\r\n":
            raise csv.Error(f"a line has more than {_MAX_FIELD_CHARS} characters")
        return line


def _reader(lines: _Lines, path: SourcePath) -> _csv.Reader:
    header, separator = lines.header()
    if separator is None and strip_compression(path.name).lower().endswith(".tsv"):
        separator = "\t"
    if separator is None:
        others = [mark for mark in _OTHER_SEPARATORS if mark in header]
        separator = others[0] if others and "," not in header else ","
    return csv.reader(lines, delimiter=separator)


def _is_separator_line(line: str) -> bool:
    marks = line.rstrip("\r\n")
    return marks[:-1].lower() == _SEPARATOR_LINE and marks[-1] in f",{_OTHER_SEPARATORS}"


def _next(reader: _csv.Reader) -> list[str] | None:
    """The next row. The csv module has one limit for the whole process, which others may rely on."""
    before = csv.field_size_limit(_MAX_FIELD_CHARS)
    try:
        return next(reader, None)
    finally:
        csv.field_size_limit(before)


def _fault(path: SourcePath, line: int, reason: str, detail: str) -> Fault:
    return Fault(key="", place=f"{path.name}:{line}", reason=reason, detail=detail)
