"""`unirl train`, `unirl resume` and `unirl report`: runs of recipes.

torch and transformers take seconds to import, so these commands import them when they run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unirl.config import nearest, replace_settings
from unirl.errors import ConfigError
from unirl.trainer.run_directory import RunDirectory

if TYPE_CHECKING:
    from unirl.trainer.recipe import Recipe

__all__ = ["report", "resume", "train"]

RECIPES = "unirl.recipes"
"""Entry point group: name -> function (*, seed) that returns a `Recipe`."""


def train(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe, such as numbers or shapes.")],
    run: Annotated[
        Path | None, typer.Option(help="Folder of the run; runs/RECIPE by default. A run there is continued.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides every random number.")] = 0,
    rollout: Annotated[
        str | None,
        typer.Option(
            metavar="native|vllm|URL", help="Engine that samples; a URL is that of `unirl rollout serve`."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: text.steps=20. May be repeated."),
    ] = None,
) -> None:
    """Run a recipe from its files to its report, or go on with a run that was stopped or killed.

    Ends with 75 when it was asked to stop (SIGTERM, SIGUSR1) and has saved its state.
    """
    assignments = [*(set_ or []), *_rollout(rollout)]
    _run(_recipe(recipe, seed, assignments), run or Path("runs") / recipe, assignments)


def resume(run: Annotated[Path, typer.Argument(help="Folder of the run.")]) -> None:
    """Go on with a run that was stopped or killed, with the settings it was started with."""
    started = RunDirectory(run).read()
    _run(_recipe(started["recipe"], started["seed"], started["assignments"]), run, started["assignments"])


def report(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    others: Annotated[
        list[Path] | None,
        typer.Argument(help="Runs of the same recipe with other seeds, drawn into the curves as a band."),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Show it on this machine, and renew it while the run goes on.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="For --serve; 0 takes a free one.")] = 0,
) -> None:
    """Write the run's report, one HTML page that needs nothing else."""
    from unirl.explore import write_report
    from unirl.explore.report_server import ReportServer

    if not serve:
        typer.echo(str(write_report(run, others=others or ())))
        return
    with ReportServer(run, others=others or (), port=port) as server:
        typer.echo(f"{server.url} (Ctrl-C ends it)")
        server.serve()


def _rollout(engine: str | None) -> list[str]:
    """Turn the choice of an engine into a setting; the URL of a server is no part of a run."""
    if engine is None:
        return []
    if engine.startswith(("http://", "https://")):
        os.environ["UNIRL_ROLLOUT_URL"] = engine
        engine = "vllm"
    return [f"settings.rollout={engine}"]


def _recipe(name: str, seed: int, assignments: Sequence[str]) -> Recipe:
    known = {entry.name: entry for entry in entry_points(group=RECIPES)}
    if name not in known:
        raise ConfigError(f"there is no recipe {name!r}{nearest(name, known)}")
    recipe: Recipe = known[name].load()(seed=seed)
    return replace_settings(recipe, assignments)


def _run(recipe: Recipe, run: Path, assignments: Sequence[str]) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from unirl.explore import write_report
    from unirl.trainer.loop import StopAsked
    from unirl.trainer.preemption import REQUEUE_EXIT_CODE
    from unirl.trainer.run import run_recipe

    try:
        summary = run_recipe(recipe, run, assignments=assignments, write_report=write_report)
    except StopAsked as stopped:
        typer.echo(f"{run}: {stopped}; the same command goes on from there", err=True)
        raise typer.Exit(REQUEUE_EXIT_CODE) from None
    for stage in summary["runs"]:
        typer.echo(
            f"stage {stage['stage']}: judge {stage['judge_before']:.1%} -> {stage['judge_after']:.1%}, "
            f"reward {stage['reward_before']:.3f} -> {stage['reward_after']:.3f}, "
            f"{stage['steps']} steps in {stage['wall_s']:.0f} s"
        )
    typer.echo(f"report: {run / 'report.html'}")
