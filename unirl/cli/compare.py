"""`unirl compare`: runs side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unirl.cli.output import AsJson, print_json, require_suffix

if TYPE_CHECKING:
    from unirl.explore import Scores

__all__ = ["compare"]

FIGURE_SUFFIXES: Final = (".png", ".svg", ".pdf")


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of two runs or more.")],
    kind: Annotated[str, typer.Option(metavar="eval|train", help="Which samples.")] = "eval",
    figure: Annotated[
        Path | None, typer.Option(help="Draw a measure over the steps: curves.png or curves.svg.")
    ] = None,
    measure: Annotated[str, typer.Option(help="With --figure: which one.")] = "reward",
    as_json: AsJson = False,
) -> None:
    """Set runs side by side: which settings differ, and every measure at the end of each stage.

    A mean stands with its standard error.

    Example: unirl compare runs/ppo runs/grpo
    Example: unirl compare runs/a runs/b --kind train --figure curves.png --measure reward
    """
    if len(runs) < 2:
        raise typer.BadParameter("name two runs or more")
    if len(set(runs)) < len(runs):
        raise typer.BadParameter(f"{', '.join(map(str, runs))}: a run stands twice")
    if kind not in ("eval", "train"):
        raise typer.BadParameter(f"--kind {kind!r}: wanted eval or train")
    require_suffix("--figure", figure, FIGURE_SUFFIXES)
    from unirl.explore import Scores, compared

    differing = _differing(runs)
    opened = {str(run): Scores.open(run) for run in runs}
    table = compared(opened, kind=kind).to_pylist()
    if figure is not None:
        _draw(opened, measure, kind, figure)
    if as_json:
        facts = {"settings": differing, "measures": table, "figure": None if figure is None else str(figure)}
        print_json(facts)
        return
    console = Console(highlight=False)
    _print_settings(console, runs, differing)
    _print_measures(console, runs, table)
    if figure is not None:
        typer.echo(str(figure))


def _differing(runs: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Settings that are not the same everywhere: name -> run -> value."""
    from unirl.trainer.run_directory import RunDirectory, flat_settings

    records = {str(run): RunDirectory(run).read() for run in runs}
    flat = {run: flat_settings(_by_name(record)) for run, record in records.items()}
    names = sorted({name for settings in flat.values() for name in settings})
    return {
        name: {run: settings.get(name) for run, settings in flat.items()}
        for name in names
        if len({json.dumps(settings.get(name)) for settings in flat.values()}) > 1
    }


def _by_name(record: Mapping[str, Any]) -> dict[str, Any]:
    """Recipe, seed and settings of a run; stages go by their names, as `--set` addresses them."""
    config = dict(record["config"])
    stages = {stage["name"]: stage for stage in config.pop("stages", ())}
    return {"recipe": record["recipe"], **config, **stages}


def _draw(runs: Mapping[str, Scores], measure: str, kind: str, path: Path) -> None:
    from unirl.explore import runs_side_by_side

    path.parent.mkdir(parents=True, exist_ok=True)
    runs_side_by_side(runs, measure, kind=kind).savefig(path)


def _print_settings(
    console: Console, runs: Sequence[Path], differing: Mapping[str, Mapping[str, Any]]
) -> None:
    if not differing:
        typer.echo("all settings are the same")
        return
    table = Table("setting", *(escape(str(run)) for run in runs), box=None)
    for name, values in differing.items():
        table.add_row(escape(name), *(escape(str(values[str(run)])) for run in runs))
    console.print(table)


def _print_measures(console: Console, runs: Sequence[Path], rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table("stage", "direction", "measure", *(escape(str(run)) for run in runs), box=None)
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        error = "" if row["error"] is None else f" ± {row['error']:.3f}"
        place = (row["stage"], row["direction"], row["measure"])
        cells.setdefault(place, {})[row["run"]] = f"{row['mean']:.3f}{error}"
    for place, values in cells.items():
        table.add_row(*map(escape, place), *(values.get(str(run), "-") for run in runs))
    console.print(table)
