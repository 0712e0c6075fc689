"""What the commands share: the arguments of a store, JSON or a line of text, a bar for what takes long."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

__all__ = [
    "AsJson",
    "StoreFolder",
    "StorePath",
    "counted",
    "is_first_rank",
    "print_json",
    "progress_bar",
    "require_http",
    "require_suffix",
    "tell",
    "two_columns",
]

StorePath = Annotated[str, typer.Argument(help="Folder of the store; to read, also its URL.")]
StoreFolder = Annotated[str, typer.Argument(help="Folder of the store, on this machine.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def is_first_rank() -> bool:
    """Whether this process speaks for all that a launcher started; True where none did."""
    return os.environ.get("RANK", "0") == "0"


def tell(facts: object, text: str, as_json: bool) -> None:
    """Print facts as JSON on one line, or a text that says the same."""
    if as_json:
        print_json(facts, indent=None)
    else:
        typer.echo(text)


def print_json(facts: object, *, indent: int | None = 2) -> None:
    """Print facts as JSON. Numbers that are not finite are null, and what JSON does not know is its text."""
    typer.echo(json.dumps(_plain(facts), indent=indent, ensure_ascii=False, allow_nan=False, default=str))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def require_http(urls: Iterable[str]) -> None:
    """Refuse what cannot be the address of a server, before anything is sent."""
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise typer.BadParameter(f"--endpoint {url}: wanted a URL such as http://127.0.0.1:8000/v1")


def require_suffix(option: str, path: Path | None, suffixes: Sequence[str]) -> None:
    """Refuse a file whose name does not say a format that can be written, before the work for it."""
    if path is not None and path.suffix.lower() not in suffixes:
        names = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
        raise typer.BadParameter(f"{option} {path}: wanted a name that ends in {names}")


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 row`, `2 rows`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def two_columns() -> Table:
    """A table of names and what belongs to them, without lines."""
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


@contextmanager
def progress_bar(what: str, is_quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on the terminal, for what takes long."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=is_quiet or not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
