"""Rows of a query as a table, as one record after the other, as CSV, JSON or Parquet."""

from __future__ import annotations

import csv
import io
import sys
from typing import TYPE_CHECKING, Final, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unirl.cli.output import counted, print_json

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["RowFormat", "print_rows"]

RowFormat = Literal["table", "csv", "json", "parquet"]

READABLE_COLUMN: Final = 16
BORDER: Final = 3


def print_rows(table: pa.Table, format: RowFormat, *, total: int | None = None) -> None:
    """Print rows. A table that does not fit the terminal becomes records, a line for each value.

    Args:
        total: Rows that there are, if the table may be only the first of them.
    """
    if format == "parquet":
        _write_parquet(table)
        return
    rows = table.to_pylist()
    if format == "json":
        print_json(rows)
    elif format == "csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(table.column_names)
        writer.writerows(row.values() for row in rows)
        typer.echo(text.getvalue(), nl=False)
    else:
        texts = [["" if value is None else str(value) for value in row.values()] for row in rows]
        console = Console()
        if not rows or _fits(table.column_names, texts, console.width):
            _print_table(console, table.column_names, texts)
        else:
            _print_records(console, table, texts)
        counted_rows = counted(len(rows), "row")
        is_all = total is None or total <= len(rows)
        typer.echo(counted_rows if is_all else f"{counted_rows} of {total}; --limit {total} shows all")


def _write_parquet(table: pa.Table) -> None:
    """Write the bytes of a Parquet file; they are nothing for a terminal."""
    import pyarrow.parquet as pq

    if sys.stdout.isatty():
        raise typer.BadParameter("Parquet is no text; send it to a file: --parquet > rows.parquet")
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    typer.echo(buffer.getvalue(), nl=False)


def _fits(names: list[str], texts: list[list[str]], width: int) -> bool:
    """Whether every column can be as wide as its values, or wide enough to be read when they are folded."""
    longest = [max(len(name), *map(len, values)) for name, *values in zip(names, *texts, strict=True)]
    return sum(min(length, READABLE_COLUMN) + BORDER for length in longest) < width


def _print_table(console: Console, names: list[str], texts: list[list[str]]) -> None:
    shown = Table()
    for name in names:
        shown.add_column(escape(name), overflow="fold")
    for row in texts:
        shown.add_row(*map(escape, row))
    console.print(shown)


def _print_records(console: Console, table: pa.Table, texts: list[list[str]]) -> None:
    names = table.column_names
    has_value = [column.null_count < len(column) for column in table.columns]
    for row in texts:
        record = Table(show_header=False, box=None)
        record.add_column(no_wrap=True)
        record.add_column(overflow="fold")
        for name, text, is_shown in zip(names, row, has_value, strict=True):
            if is_shown:
                record.add_row(escape(name), escape(text))
        console.print(record)
        console.print()
    if absent := [name for name, is_shown in zip(names, has_value, strict=True) if not is_shown]:
        console.print(f"null in all rows: {escape(', '.join(absent))}")
