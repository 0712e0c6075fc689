"""`unirl info` and `query`: a look at a store; and the commands for data in one list."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from storage import FeatureStore
from unirl.cli.ingest import ingest
from unirl.cli.output import AsJson, StorePath, two_columns
from unirl.cli.quarantine import quarantine
from unirl.cli.rows import print_rows

__all__ = ["COMMANDS", "data_app", "info", "query"]


def info(store: StorePath, as_json: AsJson = False) -> None:
    """Tell what a store holds: rows, bytes, columns, tensors, sources."""
    opened = FeatureStore.open(store)
    facts = _store_facts(opened)
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    table = two_columns()
    for name, value in facts.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(name, escape(text))
    Console(soft_wrap=True).print(table)


def query(
    store: StorePath,
    sql: Annotated[
        str, typer.Argument(help='A condition such as "width >= 256", or a whole SELECT over `samples`.')
    ] = "true",
    limit: Annotated[int, typer.Option(min=1, help="Rows shown for a condition.")] = 20,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
) -> None:
    """Select rows of the index with SQL."""
    if as_json and as_csv:
        raise typer.BadParameter("give --json or --csv, not both")
    opened = FeatureStore.open(store)
    if sql.lstrip().lower().startswith(("select", "with", "from", "(")):
        found = opened.query(sql)
    else:
        found = opened.query(f"SELECT * FROM samples WHERE (\n{sql}\n) ORDER BY row LIMIT {limit}")
    print_rows(found, as_json=as_json, as_csv=as_csv)


COMMANDS: Final[list[Callable[..., None]]] = [ingest, info, query, quarantine]

data_app = typer.Typer(help="Bring data into a store and look at it.", no_args_is_help=True)
for _command in COMMANDS:
    data_app.command()(_command)


def _store_facts(store: FeatureStore) -> dict[str, object]:
    facts: dict[str, object] = {
        "path": store.url,
        "snapshot": store.snapshot.id,
        "created": store.snapshot.created,
        "message": store.snapshot.message,
        "rows": len(store),
        "blob_bytes": store.query("SELECT coalesce(sum(bytes), 0)::BIGINT AS n FROM samples")["n"][0].as_py(),
        "columns": store.columns,
        "tensors": {name: f"{dtype}{list(shape)}" for name, (dtype, shape) in store.tensor_columns.items()},
        "quarantined": store.quarantined().num_rows,
    }
    for name in ("source", "split", "modality", "format"):
        if name in store.columns:
            counts = store.query(
                f"SELECT {name} AS name, count(*) AS n FROM samples GROUP BY 1 ORDER BY 2 DESC"
            )
            facts[f"rows by {name}"] = {str(row["name"]): row["n"] for row in counts.slice(0, 20).to_pylist()}
    return facts
