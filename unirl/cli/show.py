"""`unirl show`: a picture of a store in the terminal, or many of them on a contact sheet."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from unirl.cli.half_blocks import as_half_blocks, as_letters, fitted_size
from unirl.cli.output import AsJson, StorePath, counted, print_json, require_suffix, two_columns

if TYPE_CHECKING:
    import numpy as np

    from storage import FeatureStore, View

__all__ = ["picture_of", "show"]

OTHER_LINES: Final = 8
"""Lines of the terminal that are left for the last of what is said of the picture."""
LETTERS: Final = (100, 40)
"""Columns and lines where there is no terminal."""


def show(
    store: StorePath,
    key: Annotated[str | None, typer.Argument(help="Key of the row; its picture is drawn here.")] = None,
    sheet: Annotated[
        Path | None, typer.Option(help="Write a contact sheet instead: out.png, out.jpg or out.webp.")
    ] = None,
    where: Annotated[
        str | None, typer.Option("--where", help="With --sheet: SQL condition, which rows.")
    ] = None,
    order_by: Annotated[
        str | None, typer.Option(help="With --sheet: which come first, such as 'width DESC'.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="With --sheet: pictures, at most.")] = 48,
    columns: Annotated[int, typer.Option(min=1, help="With --sheet: pictures in a line.")] = 8,
    side: Annotated[
        int, typer.Option(min=16, max=2048, help="With --sheet: pixels of a picture's side.")
    ] = 128,
    as_json: AsJson = False,
) -> None:
    """Draw the picture of a row in the terminal, or those of a query on a contact sheet.

    A video shows its first frame. Without a terminal the picture is drawn in letters.

    Example: unirl show data/store cats/0001
    Example: unirl show data/store --sheet cats.png --where "caption LIKE '%cat%'" --limit 100
    """
    if (key is None) == (sheet is None):
        raise typer.BadParameter("name a KEY to see one picture, or --sheet FILE.png for many")
    if sheet is None and (where is not None or order_by is not None):
        raise typer.BadParameter("--where and --order-by are for a --sheet; add --sheet FILE.png")
    from unirl.cli.contact_sheet import SHEET_SUFFIXES

    require_suffix("--sheet", sheet, SHEET_SUFFIXES)
    from storage import FeatureStore

    opened = FeatureStore.open(store)
    if key is not None:
        _show_one(opened, key, as_json)
    elif sheet is not None:
        view = opened.select(where, order_by=order_by, limit=limit)
        if not len(view):
            raise typer.BadParameter(
                f"{store}: no row where {where}; `unirl info {store}` tells what is there"
            )
        _show_many(view, sheet, columns, side, as_json)


def picture_of(store: FeatureStore, row: int, modality: str | None) -> np.ndarray | None:
    """uint8 (H, W, 3): the picture of a row, or the first frame of its video; None where it has neither.

    Raises:
        DecodeError: If the bytes are damaged.
        MissingExtraError: If it is a video and PyAV is not installed.
    """
    from datapipe.decode import decode_image

    if modality is None or modality == "text":
        return None
    blob = store.blob(row)
    if not modality.startswith("video"):
        return decode_image(blob)
    from datapipe.decode.video import VideoReader

    with VideoReader(bytes(blob)) as reader:
        frame: np.ndarray = reader.frames([0])[0]
        return frame


def _show_one(store: FeatureStore, key: str, as_json: bool) -> None:
    row = store.row(key)
    facts = {name: value for name, value in _facts(store, [row])[0].items() if value is not None}
    if as_json:
        print_json(facts, indent=None)
        return
    picture = picture_of(store, row, _modality(facts))
    table = two_columns()
    for name, value in facts.items():
        table.add_row(escape(name), escape(str(value)))
    Console(soft_wrap=True).print(table)
    if picture is not None:  # last, so that the whole of it is in sight
        _draw(picture)


def _draw(picture: np.ndarray) -> None:
    import numpy as np
    from PIL import Image

    console = Console(highlight=False)
    if console.is_terminal:
        terminal = shutil.get_terminal_size()
        columns, lines = terminal.columns, max(4, terminal.lines - OTHER_LINES)
    else:
        columns, lines = LETTERS
    height, width = fitted_size(*picture.shape[:2], columns=columns, lines=lines)
    way = Image.Resampling.NEAREST if height >= picture.shape[0] else Image.Resampling.BOX
    scaled = np.asarray(Image.fromarray(picture).resize((width, height), way))
    if console.is_terminal and console.color_system is not None and not console.no_color:
        console.print(as_half_blocks(scaled), soft_wrap=True)
    else:
        typer.echo(as_letters(scaled))


def _show_many(view: View, sheet: Path, columns: int, side: int, as_json: bool) -> None:
    from datapipe import DataError
    from storage import StorageError
    from unirl.cli.contact_sheet import write_sheet

    pictures: list[np.ndarray | None] = []
    problems: list[str] = []
    rows = _facts(view.store, view.rows.tolist())
    for facts in rows:
        try:
            pictures.append(picture_of(view.store, int(facts["row"]), _modality(facts)))
        except (DataError, StorageError) as error:
            pictures.append(None)
            problems.append(f"{facts['key']}: {error}")
    write_sheet(
        sheet, pictures, [str(f.get("caption") or f["key"]) for f in rows], columns=columns, side=side
    )
    for problem in problems:
        typer.echo(problem, err=True)
    if as_json:
        keys = [facts["key"] for facts in rows]
        print_json({"sheet": str(sheet), "keys": keys, "problems": problems}, indent=None)
    else:
        typer.echo(f"{sheet}: {counted(len(rows), 'row')}, the captions below their pictures")


def _facts(store: FeatureStore, rows: list[int]) -> list[dict[str, Any]]:
    """The index's columns of some rows, in their order."""
    table = store.query(f"SELECT * FROM samples WHERE row IN ({', '.join(map(str, rows))})")
    by_row = {facts["row"]: facts for facts in table.to_pylist()}
    return [by_row[row] for row in rows]


def _modality(facts: dict[str, Any]) -> str | None:
    """What the blob is; a store that does not say holds pictures."""
    if facts.get("bytes") is None:
        return None
    return str(facts.get("modality") or "image")
