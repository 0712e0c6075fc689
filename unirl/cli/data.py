"""`unirl info` and `query`: a look at a store; and the commands for data in one list."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from unirl.cli.ingest import ingest
from unirl.cli.output import AsJson, StorePath, print_json, two_columns
from unirl.cli.quarantine import quarantine
from unirl.cli.rows import RowFormat, print_rows
from unirl.cli.show import show

if TYPE_CHECKING:
    from storage import FeatureStore

__all__ = ["COMMANDS", "data_app", "info", "query"]

SHOWN_ROWS: Final = 20


def info(store: StorePath, as_json: AsJson = False) -> None:
    """Tell what a store holds: rows, bytes, columns, tensors, sources.

    Example: unirl info data/store --json
    """
    from storage import FeatureStore

    opened = FeatureStore.open(store)
    facts = _store_facts(opened)
    if as_json:
        print_json(facts)
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
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Rows, at most. Left out, the table of a condition shows {SHOWN_ROWS}; all else is whole.",
        ),
    ] = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
    as_parquet: Annotated[
        bool, typer.Option("--parquet", help="Write a Parquet file to the standard output.")
    ] = False,
) -> None:
    """Select rows of the index with SQL.

    Example: unirl query data/store "width >= 256 AND split = 'train'"
    Example: unirl query data/store "SELECT split, count(*) FROM samples GROUP BY split" --csv
    Example: unirl query data/store "caption LIKE '%cat%'" --parquet > cats.parquet
    """
    from storage import FeatureStore

    if not sql.strip():
        raise typer.BadParameter('the condition is empty; write one, such as "width >= 256", or leave it out')
    format = _format(as_json=as_json, as_csv=as_csv, as_parquet=as_parquet)
    opened = FeatureStore.open(store)
    if sql.lstrip().lower().startswith(("select", "with", "from", "(")):
        selected = opened.query(sql)
        print_rows(selected.slice(0, limit), format, total=selected.num_rows)
        return
    most = limit or (SHOWN_ROWS if format == "table" else None)
    ordered = f"SELECT * FROM samples WHERE (\n{sql}\n) ORDER BY row"
    found = opened.query(ordered if most is None else f"{ordered} LIMIT {most}")
    is_cut = format == "table" and found.num_rows == most
    print_rows(found, format, total=len(opened.select(sql)) if is_cut else None)


COMMANDS: Final[list[Callable[..., None]]] = [ingest, info, query, show, quarantine]

data_app = typer.Typer(help="Bring data into a store and look at it.", no_args_is_help=True)
for _command in COMMANDS:
    data_app.command()(_command)


def _format(*, as_json: bool, as_csv: bool, as_parquet: bool) -> RowFormat:
    if as_json + as_csv + as_parquet > 1:
        raise typer.BadParameter("give one of --json, --csv and --parquet")
    return "json" if as_json else "csv" if as_csv else "parquet" if as_parquet else "table"


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
