"""A plan of a run, as text or JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import typer
from rich.console import Console
from rich.table import Table

from unirl.cli.output import counted, print_json, two_columns

if TYPE_CHECKING:
    from unirl.trainer.plan import RunPlan

__all__ = ["print_plan"]

MIB: Final = 1 << 20
SUMS: Final = ("update", "rollout", "peak")


def print_plan(plan: RunPlan, *, as_json: bool) -> None:
    """Print what would be done, then notes and problems."""
    if as_json:
        print_json(asdict(plan))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(_overview(plan))
    console.print(_stages(plan))
    for note in plan.notes:
        typer.echo(f"note: {note}")
    for problem in plan.problems:
        typer.echo(f"problem: {problem}", err=True)
    if not plan.problems:
        typer.echo("this run can start; nothing was trained")


def _overview(plan: RunPlan) -> Table:
    table = two_columns()
    table.add_row("recipe", f"{plan.recipe}, seed {plan.seed}")
    table.add_row("run", f"{plan.run} ({_state(plan)})")
    table.add_row("processes", str(plan.world_size))
    if plan.store is None:
        table.add_row("data", "made when the run starts")
    else:
        table.add_row("data", f"{plan.store}, {plan.num_rows} rows")
    for name, count in plan.rows.items():
        table.add_row(f"  {name}", counted(count, "row"))
    if plan.vocabulary:
        sizes = plan.vocabulary
        table.add_row(
            "vocabulary",
            f"{sizes['text_ids']} text ids, {sizes['image_codes']} image codes, "
            f"{sizes['codes_per_picture']} to a picture, {sizes['positions']} positions",
        )
        table.add_row("parameters", ", ".join(f"{name} {n:,}" for name, n in plan.parameters.items()))
    if plan.memory_bytes:
        parts = {name: size / MIB for name, size in plan.memory_bytes.items() if name not in SUMS and size}
        shown = ", ".join(f"{name} {size:,.1f}" for name, size in parts.items())
        peak = plan.memory_bytes["peak"] / MIB
        table.add_row("memory", f"about {peak:,.0f} MiB a process beside the libraries' 500 ({shown})")
    return table


def _state(plan: RunPlan) -> str:
    finished = [part for part, is_there in plan.prepared.items() if is_there]
    return f"there already: {', '.join(finished)}" if finished else "new"


def _stages(plan: RunPlan) -> Table:
    table = Table(box=None)
    for name in (
        "stage",
        "writes",
        "algorithm",
        "steps",
        "prompts",
        "a step",
        "samples",
        "updates",
        "tokens",
    ):
        table.add_column(name, justify="left" if name in ("stage", "writes", "algorithm") else "right")
    for stage in plan.stages:
        table.add_row(
            stage.name,
            stage.direction,
            stage.algorithm,
            str(stage.steps),
            "?" if stage.num_prompts is None else str(stage.num_prompts),
            f"{stage.prompts_per_step} x {stage.group_size}",
            str(stage.steps * stage.samples_per_step),
            str(stage.optimizer_steps),
            f"<= {stage.max_response_tokens}",
        )
    return table
