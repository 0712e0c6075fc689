"""Rows of a query as a table, as one record after the other, as CSV or as JSON."""

from __future__ import annotations

import csv
import io
import json
from typing import Final

import pyarrow as pa
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["print_rows"]

READABLE_COLUMN: Final = 16
BORDER: Final = 3


def print_rows(table: pa.Table, *, as_json: bool, as_csv: bool) -> None:
    """Print a table that fits the terminal; records, a line for each value, where it does not."""
    rows = table.to_pylist()
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False, default=str))
    elif as_csv:
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
        typer.echo("1 row" if len(rows) == 1 else f"{len(rows)} rows")


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
