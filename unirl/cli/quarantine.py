"""`unirl quarantine`: what could not be used, and another try."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unirl.cli.output import AsJson, StorePath, counted, print_json
from unirl.cli.signals import stop_on_signal

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["quarantine"]

_MAX_NAME: Final = 80
_COLUMNS: Final = ["key", "place", "reason"]


def quarantine(
    store: StorePath,
    reason: Annotated[str | None, typer.Option(help="Only this reason code, such as truncated.")] = None,
    try_again: Annotated[
        bool, typer.Option("--retry", help="Read the sources of what is bad again; add what is good now.")
    ] = False,
    max_pixels: Annotated[
        int | None, typer.Option(min=1, help="With --retry: a budget other than that of the ingest.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="With --retry: threads that read and decode.")] = 2,
    save: Annotated[
        Path | None, typer.Option(help="Write the bytes that were kept to files in this folder.")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="List what was settled since as well.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the samples that could not be used, with place and reason, and counts by reason.

    Example: unirl quarantine data/store --reason truncated --save bad-files
    Example: unirl quarantine data/store --retry
    """
    from storage import FeatureStore

    if save is not None and save.exists() and not save.is_dir():
        raise typer.BadParameter(f"--save {save}: there is a file of this name; name a folder")
    if try_again:
        _retry(store, max_pixels, workers, is_quiet=as_json)
    found = _of_reason(FeatureStore.open(store).quarantined(with_resolved=show_all), reason)
    if save is not None:
        num_saved = _save(found, save)
        typer.echo(f"{counted(num_saved, 'file')} written to {save}", err=as_json)
    if as_json:
        print_json(found.select(_COLUMNS).to_pylist())
    else:
        _print(found, reason)


def _retry(store: str, max_pixels: int | None, workers: int, *, is_quiet: bool) -> None:
    from datapipe import retry

    with stop_on_signal() as should_stop:
        found = retry(
            store, max_pixels=max_pixels, workers=workers, progress=not is_quiet, should_stop=should_stop
        )
    for text in found.gone:
        typer.echo(f"gone: {text}", err=True)
    left_out = f", {counted(len(found.gone), 'source')} gone" if found.gone else ""
    typer.echo(f"{found.num_added} added, {found.num_bad} bad still{left_out}", err=is_quiet)


def _of_reason(table: pa.Table, reason: str | None) -> pa.Table:
    import pyarrow as pa

    if reason is None:
        return table
    keep = [_code(text) == reason for text in table.column("reason").to_pylist()]
    return table.filter(pa.array(keep, pa.bool_()))


def _save(table: pa.Table, folder: Path) -> int:
    """Write one file for each record with bytes. Names are made here, so that none leaves the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    num_saved = 0
    for at, (key, data) in enumerate(zip(table.column("key").to_pylist(), table.column("data").to_pylist())):
        if data:
            plain = "".join(char if char.isalnum() or char in "-_" else "_" for char in key)[-_MAX_NAME:]
            (folder / f"{at:06d}-{plain}.{_suffix(data)}").write_bytes(data)
            num_saved += 1
    return num_saved


def _suffix(data: bytes) -> str:
    from datapipe.decode.sniff import sniff_image_format
    from datapipe.errors import DecodeError

    try:
        return sniff_image_format(data).lower()
    except DecodeError as error:
        return error.reason


def _print(table: pa.Table, reason: str | None) -> None:
    if not table.num_rows:
        typer.echo("nothing is refused" if reason is None else f"nothing is refused as {reason}")
        return
    shown = Table(*_COLUMNS)
    for row in table.select(_COLUMNS).to_pylist():
        shown.add_row(*(escape(str(row[name])) for name in _COLUMNS))
    console = Console()
    console.print(shown)
    counts = Counter(_code(text) for text in table.column("reason").to_pylist())
    for code, count in counts.most_common():
        typer.echo(f"{count:8d} {code}")
    typer.echo(counted(table.num_rows, "row"))


def _code(reason: str) -> str:
    return reason.partition(":")[0]
