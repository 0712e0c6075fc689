"""`unirl doctor`: is this machine fit, and if not, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unirl.cli.check import Check, Status
from unirl.cli.output import AsJson, counted, print_json

__all__ = ["doctor"]

EXIT_PROBLEMS: Final = 1
STYLES: Final[dict[Status, str]] = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}


def doctor(
    folder: Annotated[
        Path,
        typer.Option(exists=True, file_okay=False, help="Where stores and runs will be; its disk is tried."),
    ] = Path(),
    deep: Annotated[
        bool, typer.Option("--deep", help="Also import vLLM, which takes a while, and add up on every GPU.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check versions, GPUs, memory, disk, vLLM and decoders, and say what to do. Ends with 1 at a problem.

    A note is something that only some runs need.

    Example: unirl doctor
    Example: unirl doctor --folder /scratch/me --deep
    """
    from unirl.cli.machine_checks import check_machine

    checks = check_machine(folder, deep=deep)
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        _print(checks)
    if any(check.status == "problem" for check in checks):
        raise typer.Exit(EXIT_PROBLEMS)


def _print(checks: Sequence[Check]) -> None:
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        style = STYLES[check.status]
        table.add_row(f"[{style}]{check.status}[/]", escape(check.name), escape(check.found))
        if check.remedy:
            table.add_row("", "", escape(f"-> {check.remedy}"))
    Console(highlight=False).print(table)
    problems = sum(check.status == "problem" for check in checks)
    warnings = sum(check.status == "warning" for check in checks)
    if problems or warnings:
        typer.echo(f"{counted(problems, 'problem')}, {counted(warnings, 'warning')}")
    else:
        typer.echo("everything that a run needs is here")
