"""`unirl eval`: how good is the policy of a run, on the run's held-out prompts?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from unirl.cli.output import AsJson, print_json
from unirl.cli.runs import recipe_of_run
from unirl.trainer.run_directory import RunDirectory

__all__ = ["eval_run"]


def eval_run(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    weights: Annotated[
        str,
        typer.Option(
            metavar="final|start|newest|STEP",
            help="The trained policy, the one before RL, or a checkpoint's; final, or newest before the end.",
        ),
    ] = "",
    num: Annotated[
        int | None, typer.Option(min=1, help="Prompts, at most; the run's own number if left out.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the samples; the run's own gives its own samples again.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Sample once from each evaluation prompt of a run, and say what reward and judge make of it.

    The run is left as it is. With the run's own seed and the final weights the numbers are those of the run.

    Example: unirl eval runs/demo
    Example: unirl eval runs/demo --weights 40 --json
    """
    started = RunDirectory(run).read()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from unirl.trainer.evaluate_run import evaluate_run

    recipe = recipe_of_run(run, started)
    name, found = evaluate_run(recipe, run, weights=weights, num_prompts=num, seed=seed)
    if as_json:
        facts = {direction: evaluation.numbers for direction, evaluation in found.items()}
        named: dict[str, object] = {"run": str(run), "weights": name}
        print_json(named | facts)
        return
    table = Table(box=None)
    for column in ("writes", "prompts", "judge", "reward"):
        table.add_column(column, justify="left" if column == "writes" else "right")
    for direction, evaluation in found.items():
        numbers = evaluation.numbers
        judge, reward = numbers["eval/judge"], numbers["eval/reward"]
        table.add_row(
            direction,
            str(len(evaluation.samples)),
            "-" if judge is None else f"{judge:.1%}",
            "-" if reward is None else f"{reward:.4f}",
        )
    typer.echo(f"{run}, {name}")
    Console(highlight=False).print(table)
