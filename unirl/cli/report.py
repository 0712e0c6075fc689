"""`unirl report`: a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unirl.cli.output import AsJson, tell
from unirl.cli.signals import interrupted_by_terminate

__all__ = ["report"]


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
    as_json: AsJson = False,
) -> None:
    """Write the run's report, one HTML page that needs nothing else.

    Example: unirl report runs/demo
    Example: unirl report runs/demo --serve
    """
    if port and not serve:
        raise typer.BadParameter("--port is for --serve; add --serve to show the page at that port")
    from unirl.explore import write_report
    from unirl.explore.report_server import ReportServer

    if not serve:
        page = str(write_report(run, others=others or ()))
        tell({"report": page}, page, as_json)
        return
    with interrupted_by_terminate(), ReportServer(run, others=others or (), port=port) as server:
        tell({"url": server.url}, f"{server.url} (Ctrl-C ends it)", as_json)
        server.serve()
