"""`unirl train` and `unirl resume`: runs of recipes.

torch and transformers take seconds to import, so these commands import them when they run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from unirl.cli.output import AsJson, is_first_rank, tell
from unirl.config import nearest, replace_settings
from unirl.errors import AlarmError, ConfigError
from unirl.trainer.run_directory import RunDirectory

if TYPE_CHECKING:
    from unirl.trainer.recipe import Recipe

__all__ = ["RECIPES", "recipe_of", "recipe_of_run", "resume", "train"]

RECIPES: Final = "unirl.recipes"
"""Entry point group: name -> function (*, seed), some with `tiny`, that returns a `Recipe`."""
OF_SCRIPT: Final[dict[str, Callable[..., Recipe]]] = {}
"""Recipes that the script around this process gave to `unirl.cli.main`, by name."""
TINY: Final = "_tiny"
"""Ends the name of a recipe's tiny form."""
RUN_PARTS: Final = frozenset(
    ("run.json", "metrics.jsonl", "files", "store", "models", "checkpoints", "experience", "tensorboard")
)
LOGS: Final = (".log", ".out", ".err")
"""A scheduler may have put its own files into the folder of a run that is to begin."""
EXIT_PROBLEMS: Final = 1
EXIT_ALARM: Final = 4
"""The run was ended by an alarm, with its state saved."""


def _recipes_like(incomplete: str) -> list[str]:
    """What the shell offers for the name of a recipe."""
    return sorted(e.name for e in entry_points(group=RECIPES) if e.name.startswith(incomplete))


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="Name of a recipe, such as numbers, shapes or own_data.", autocompletion=_recipes_like
        ),
    ],
    run: Annotated[
        Path | None, typer.Option(help="Folder of the run; runs/RECIPE by default. A run there is continued.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Your data, for own_data; short for --set data.store=STORE.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Decides every random number.")] = 0,
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
    settings: Annotated[
        Path | None,
        typer.Option(help="File with a PATH=VALUE on each line; --set goes over it."),
    ] = None,
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="Random weights of the same classes, to try a GPU recipe on a CPU."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the plan, and train nothing.")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="With --dry-run: processes that it would run on.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a recipe from its files to its report, or go on with a run that was stopped or killed.

    Ends with 75 when it was asked to stop (SIGTERM, SIGUSR1) and has saved its state. A dry run touches no
    GPU, writes nothing, and ends with 1 when something would stop the run.

    Example: unirl train numbers --run runs/demo
    Example: unirl train shapes --set text.algorithm=grpo --set image.steps=40 --seed 3
    Example: unirl train own_data --store data/store --dry-run
    Example: unirl train janus_pro_t2i --tiny
    """
    if ranks is not None and not dry_run:
        raise typer.BadParameter(
            "--ranks is for --dry-run; to train on several processes: torchrun --nproc-per-node N -m -- "
            f"unirl train {recipe}"
        )
    recipe = recipe + TINY if tiny else recipe
    if store is not None:
        _require_store_recipe(recipe, seed)
    assignments = [
        *_lines(settings),
        *(set_ or []),
        *([] if store is None else [f"data.store={store}"]),
        *_rollout(rollout),
    ]
    made = recipe_of(recipe, seed, assignments)
    place = run or Path("runs") / recipe
    _require_run_folder(place)
    if dry_run:
        _print_plan(made, place, ranks, as_json)
    else:
        _run(made, place, assignments, as_json)


def resume(run: Annotated[Path, typer.Argument(help="Folder of the run.")], as_json: AsJson = False) -> None:
    """Go on with a run that was stopped or killed, with the settings it was started with.

    Example: unirl resume runs/demo
    """
    started = RunDirectory(run).read()
    recipe = recipe_of_run(run, started)
    _run(recipe, run, started.get("assignments", ()), as_json)


def recipe_of(name: str, seed: int, assignments: Sequence[str]) -> Recipe:
    """A recipe by name, with settings changed.

    Raises:
        ConfigError: If there is no such recipe or setting; names the nearest.
    """
    return replace_settings(_named(name, seed), assignments)


def recipe_of_run(run: Path, record: Mapping[str, Any]) -> Recipe:
    """The recipe that a run was started with, out of what `run.json` says.

    Raises:
        ConfigError: If neither an installed package nor the script around this call names the recipe.
    """
    name = str(record["recipe"])
    known = {entry.name for entry in entry_points(group=RECIPES)} | OF_SCRIPT.keys()
    if name.removesuffix(TINY) not in known:
        raise ConfigError(
            f"{run}: was made by a recipe {name!r}, which no installed package has among its entry points "
            f"{RECIPES!r}; if a script made it, start that again, or call `unirl.cli.main` in it with "
            f"recipes={{{name!r}: ...}}, which makes every command know it"
        )
    return recipe_of(name, record["seed"], record.get("assignments", ()))


def _named(name: str, seed: int) -> Recipe:
    installed = {entry.name: entry for entry in entry_points(group=RECIPES)}
    whole = name.removesuffix(TINY)
    file = whole.partition(":")[0]
    if file.endswith(".py"):
        raise ConfigError(
            f"{whole}: a recipe in a file of your own is started by that file, with all options of `unirl "
            f'train`: end it with main(["train", "NAME", *sys.argv[1:]], recipes={{"NAME": FUNCTION}}) of '
            f"unirl.cli, and type `python {file} --run RUN`"
        )
    if whole not in installed and whole not in OF_SCRIPT:
        raise ConfigError(f"there is no recipe {whole!r}{nearest(whole, [*installed, *OF_SCRIPT])}")
    function: Callable[..., Recipe] = OF_SCRIPT[whole] if whole in OF_SCRIPT else installed[whole].load()
    if whole == name:
        return function(seed=seed)
    if "tiny" not in signature(function).parameters:
        raise ConfigError(f"recipe {whole} has no tiny form; it is made for a CPU as it is")
    return function(seed=seed, tiny=True)


def _require_store_recipe(name: str, seed: int) -> None:
    from unirl.trainer.clone import HasStore

    if not isinstance(_named(name, seed).data, HasStore):
        raise typer.BadParameter(f"recipe {name} makes its own data; --store is for recipes such as own_data")


def _require_run_folder(place: Path) -> None:
    """Refuse a place with something else, such as the pictures, before a run is begun in it."""
    if place.exists() and not place.is_dir():
        raise ConfigError(f"{place}: there is a file of this name; name a folder for the run")
    names = {path.name for path in place.iterdir()} if place.is_dir() else set()
    others = {name for name in names if not name.startswith(".") and not name.endswith(LOGS)}
    if others and not names & RUN_PARTS:
        raise ConfigError(f"{place}: holds other things and no run; name a new folder with --run")


def _lines(settings: Path | None) -> list[str]:
    """The assignments of a file; empty lines and those that begin with # say nothing."""
    if settings is not None and not settings.is_file():
        wrong = "a folder, wanted a file of settings" if settings.is_dir() else "there is no such file"
        raise typer.BadParameter(f"--settings {settings}: {wrong}")
    try:
        text = "" if settings is None else settings.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise typer.BadParameter(
            f"--settings {settings}: no text, wanted a PATH=VALUE on each line"
        ) from None
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _rollout(engine: str | None) -> list[str]:
    """Turn the choice of an engine into a setting; the URL of a server is no part of a run."""
    if engine is None:
        return []
    if engine.startswith(("http://", "https://")):
        os.environ["UNIRL_ROLLOUT_URL"] = engine
        engine = "vllm"
    return [f"settings.rollout={engine}"]


def _print_plan(recipe: Recipe, run: Path, ranks: int | None, as_json: bool) -> None:
    from unirl.cli.plan import print_plan
    from unirl.trainer.plan import plan_run

    plan = plan_run(recipe, run, world_size=ranks or int(os.environ.get("WORLD_SIZE", "1")))
    print_plan(plan, as_json=as_json)
    if plan.problems:
        raise typer.Exit(EXIT_PROBLEMS)


def _run(recipe: Recipe, run: Path, assignments: Sequence[str], as_json: bool) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from unirl.explore import write_report
    from unirl.trainer.loop import StopAsked
    from unirl.trainer.preemption import REQUEUE_EXIT_CODE
    from unirl.trainer.run import run_recipe

    try:
        summary = run_recipe(recipe, run, assignments=assignments, write_report=write_report)
    except StopAsked as stopped:
        if is_first_rank():
            typer.echo(f"{run}: {stopped}; the same command goes on from there", err=True)
        raise typer.Exit(REQUEUE_EXIT_CODE) from None
    except AlarmError as alarm:
        typer.echo(f"{run}: {alarm}", err=True)
        raise typer.Exit(EXIT_ALARM) from None
    if not is_first_rank():
        return
    lines = [*map(_stage_line, summary["runs"]), f"report: {run / 'report.html'}"]
    tell({"run": str(run), **summary}, "\n".join(lines), as_json)


def _stage_line(stage: Mapping[str, Any]) -> str:
    return (
        f"stage {stage['stage']}: judge {_share(stage['judge_before'])} -> {_share(stage['judge_after'])}, "
        f"reward {_number(stage['reward_before'])} -> {_number(stage['reward_after'])}, "
        f"{stage['steps']} steps in {stage['wall_s']:.0f} s"
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
