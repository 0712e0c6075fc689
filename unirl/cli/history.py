"""`unirl log`, `diff` and `tag`: the snapshots of a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unirl.cli.output import AsJson, StorePath, print_json, tell

__all__ = ["COMMANDS", "diff", "log", "tag"]

_SHOWN_ROWS: Final = 20


def log(store: StorePath, as_json: AsJson = False) -> None:
    """List the snapshots of a store, newest first, with their tags.

    Example: unirl log data/store
    """
    from storage import FeatureStore

    opened = FeatureStore.open(store)
    tags: dict[int, list[str]] = {}
    for name, number in opened.tags().items():
        tags.setdefault(number, []).append(name)
    rows = [
        {
            "snapshot": snapshot.id,
            "created": snapshot.created,
            "rows": snapshot.num_rows,
            "parts": len(snapshot.parts),
            "tags": tags.get(snapshot.id, []),
            "message": snapshot.message,
        }
        for snapshot in opened.log()
    ]
    if as_json:
        print_json(rows)
        return
    table = Table(box=None)
    for name in rows[0]:
        table.add_column(name, no_wrap=name not in ("tags", "message"), overflow="fold")
    for row in rows:
        row["created"] = str(row["created"])[:19] + "Z"  # to the second
        table.add_row(*(escape(", ".join(v) if isinstance(v, list) else str(v)) for v in row.values()))
    Console(soft_wrap=True).print(table)


def diff(
    store: StorePath,
    old: Annotated[str, typer.Argument(help="Number or tag of a snapshot.")],
    new: Annotated[str, typer.Argument(help="Number or tag of another one.")],
    as_json: AsJson = False,
) -> None:
    """Tell what changed between two snapshots: rows, columns, tensor columns.

    Example: unirl diff data/store 3 released
    """
    from storage import FeatureStore

    found = FeatureStore.open(store).diff(_snapshot_name(old), _snapshot_name(new))
    facts: dict[str, Any] = {
        "old": found.old,
        "new": found.new,
        "rows_added": found.rows_added.tolist(),
        "rows_removed": found.rows_removed.tolist(),
        "columns_added": list(found.columns_added),
        "columns_removed": list(found.columns_removed),
        "tensors_added": list(found.tensors_added),
        "tensors_removed": list(found.tensors_removed),
    }
    lines = [f"snapshot {found.old} -> {found.new}"]
    lines += [
        f"{name.replace('_', ' ')}: {_short(value)}" for name, value in list(facts.items())[2:] if value
    ]
    tell(facts, "\n".join(lines), as_json)


def tag(
    store: StorePath,
    name: Annotated[str | None, typer.Argument(help="The tag; without one all are listed.")] = None,
    snapshot: Annotated[
        int | None, typer.Option(help="Number of a snapshot; the newest if not given.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Forget the tag; the snapshot stays.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give a snapshot a name, under which gc keeps it; or list the tags.

    Example: unirl tag data/store released --snapshot 7
    """
    from storage import FeatureStore

    opened = FeatureStore.open(store)
    if name is None and (remove or snapshot is not None):
        raise typer.BadParameter("give the name of the tag")
    if name is not None and remove:
        opened.untag(name)
    elif name is not None:
        opened.tag(name, snapshot)
    tags = opened.tags()
    tell(tags, "\n".join(f"{one}  {number}" for one, number in tags.items()) or "no tags", as_json)


COMMANDS: Final[dict[str, Callable[..., None]]] = {"log": log, "diff": diff, "tag": tag}


def _snapshot_name(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _short(values: list[Any]) -> str:
    shown = ", ".join(map(str, values[:_SHOWN_ROWS]))
    return f"{len(values)} ({shown}{', ...' if len(values) > _SHOWN_ROWS else ''})"
