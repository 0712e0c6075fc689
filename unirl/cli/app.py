"""The `unirl` command: every sub-command in one place, and every error as one sentence."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence

import typer
from rich.console import Console
from rich.logging import RichHandler

from datapipe import DataError
from storage import StorageError
from unirl.cli import bench, care, data, exchange, history, models, reward_server, rewards, rollout, runs
from unirl.cli.join import join
from unirl.errors import UniRLError

__all__ = ["app", "main"]

app = typer.Typer(
    name="unirl",
    help="Post-training for models that read and write text and images.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
tokenizer_app = typer.Typer(no_args_is_help=True, help="Image tokenizers.")
bench_app = typer.Typer(no_args_is_help=True, help="Speeds of this machine.")
rollout_app = typer.Typer(no_args_is_help=True, help="Engines that sample from the policy.")
reward_app = typer.Typer(no_args_is_help=True, help="Reward models.")

commands: dict[str, Callable[..., None]] = {
    **{command.__name__: command for command in data.COMMANDS},
    **care.COMMANDS,
    **exchange.COMMANDS,
    **history.COMMANDS,
    "sft": models.sft,
    "train": runs.train,
    "resume": runs.resume,
    "report": runs.report,
}
for name, command in commands.items():
    app.command(name)(command)
for name, command in bench.COMMANDS.items():
    bench_app.command(name)(command)
for name, command in rewards.COMMANDS.items():
    reward_app.command(name)(command)
for name, command in rollout.COMMANDS.items():
    rollout_app.command(name)(command)
reward_app.command("serve")(reward_server.serve)
app.command("join")(join)
tokenizer_app.command("train")(models.train_tokenizer)
tokenizer_app.command("encode")(models.encode)
app.add_typer(bench_app, name="bench")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(reward_app, name="reward")
app.add_typer(rollout_app, name="rollout")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `arguments` default to those of the process. Ends the process.

    Exit codes: 0 done, 1 an error, 2 wrong usage or a store that another ingest is writing to, 3 more bad
    samples than allowed, 75 stopped on request with the state saved.
    """
    console = Console(stderr=True)
    handler = RichHandler(
        console=console, show_path=False, show_level=False, log_time_format="%X", markup=False
    )
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    logging.getLogger("unirl").setLevel(os.environ.get("UNIRL_LOG", "INFO").upper())
    try:
        app(args=None if arguments is None else list(arguments), prog_name="unirl")
    except (UniRLError, StorageError, DataError) as error:
        logging.getLogger("unirl").debug("the traceback of the error below", exc_info=True)
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
