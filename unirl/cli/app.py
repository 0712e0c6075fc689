"""The `unirl` command: every sub-command in one place, and every error as one sentence.

What a command needs it imports when it runs, so that `unirl --help` comes at once.
"""

from __future__ import annotations

import errno
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from unirl.cli import (
    bench,
    care,
    compare,
    data,
    doctor,
    evaluate,
    exchange,
    history,
    models,
    report,
    reward_server,
    rewards,
    rollout,
    runs,
    score,
)
from unirl.cli.join import join
from unirl.cli.output import is_first_rank
from unirl.config import nearest

if TYPE_CHECKING:
    from unirl.trainer.recipe import Recipe

__all__ = ["app", "main"]

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
EXAMPLE = re.compile(r"^Example: ", re.MULTILINE)
HELP_WIDTH = 110
FULL = (errno.ENOSPC, errno.EDQUOT)
MAKE_ROOM = "make room (`df -h` shows where), or name a place on another disk"
NO_WRAP = "\b"
"""Before a paragraph: its lines stay as they are."""

COMMANDS: Mapping[str, Callable[..., None]] = {
    **{command.__name__: command for command in data.COMMANDS},
    **care.COMMANDS,
    **exchange.COMMANDS,
    **history.COMMANDS,
    "sft": models.sft,
    "join": join,
    "train": runs.train,
    "resume": runs.resume,
    "eval": evaluate.eval_run,
    "report": report.report,
    "compare": compare.compare,
    "score": score.score,
    "doctor": doctor.doctor,
}
GROUPS: Mapping[str, tuple[str, Mapping[str, Callable[..., None]]]] = {
    "tokenizer": ("Image tokenizers.", models.TOKENIZER_COMMANDS),
    "reward": ("Reward models.", {**rewards.COMMANDS, "serve": reward_server.serve}),
    "rollout": ("Engines that sample from the policy.", rollout.COMMANDS),
    "bench": ("Speeds of this machine.", bench.COMMANDS),
}


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        typer.echo(f"unirl {version('unirl')}")
        raise typer.Exit


def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """Options of `unirl` itself."""


def main(
    arguments: Sequence[str] | None = None, *, recipes: Mapping[str, Callable[..., Recipe]] | None = None
) -> None:
    """Run the command line. Ends the process, with a code of docs/cli.md.

    Args:
        arguments: What stands behind `unirl`; those of the process by default.
        recipes: Functions `(*, seed) -> Recipe` by name, known to this call beside the installed ones, so
            that a script has every option and exit code of `unirl train` for a recipe of its own:
            `main(["train", "mine", *sys.argv[1:]], recipes={"mine": mine})`.
    """
    runs.OF_SCRIPT.update(recipes or {})
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    console = Console(stderr=True)
    handler = RichHandler(
        console=console, show_path=False, show_level=False, log_time_format="%X", markup=False
    )
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    level = os.environ.get("UNIRL_LOG", "INFO" if is_first_rank() else "WARNING").upper()
    if level not in LEVELS:
        typer.echo(f"error: UNIRL_LOG is {level!r}{nearest(level, LEVELS)}", err=True)
        sys.exit(2)
    logging.getLogger("unirl").setLevel(level)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="unirl")
    except SystemExit:
        raise
    except _expected_errors() as error:
        logging.getLogger("unirl").debug("the traceback of the error below", exc_info=True)
        typer.echo(f"error: {_sentence(error)}", err=True)
        sys.exit(1)


def _expected_errors() -> tuple[type[Exception], ...]:
    """What a user can mend: the errors that are raised on purpose, and those of the machine."""
    from datapipe import DataError
    from unirl.errors import UniRLError

    loaded = sys.modules.get("safetensors")
    of_files = () if loaded is None else (loaded.SafetensorError,)
    return UniRLError, DataError, OSError, *of_files  # StorageError is an OSError


def _sentence(error: BaseException) -> str:
    """An error's text; the system's own errors say what and which file."""
    if isinstance(error, OSError) and error.strerror:
        places = [str(name) for name in (error.filename, error.filename2) if name is not None]
        said = f"{' -> '.join(places)}: {error.strerror}" if places else error.strerror
        return f"{said}; {MAKE_ROOM}" if error.errno in FULL else said
    # safetensors tells the system's error in its text alone.
    is_full = any(f"(os error {number})" in str(error) for number in FULL)
    return f"{error}; {MAKE_ROOM}" if is_full else str(error)


def _with_examples(command: Callable[..., None]) -> str:
    """A command's docstring, with its examples on lines of their own that are never folded."""
    text, *examples = EXAMPLE.split(inspect.getdoc(command) or "")
    if not examples:
        return text
    lines = [f"  {example.strip()}" for example in examples]
    return "\n".join([text.rstrip(), "", NO_WRAP, "Example:" if len(lines) == 1 else "Examples:", *lines])


def _group(help: str, commands: Mapping[str, Callable[..., None]], **options: Any) -> typer.Typer:
    made = typer.Typer(
        help=help,
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"max_content_width": HELP_WIDTH},
        **options,
    )
    for name, command in commands.items():
        made.command(name, help=_with_examples(command))(command)
    return made


app = _group(
    "Post-training for models that read and write text and images.",
    COMMANDS,
    name="unirl",
    pretty_exceptions_enable=False,
)
app.callback()(options)
for _name, (_help, _commands) in GROUPS.items():
    app.add_typer(_group(_help, _commands), name=_name)
