"""`unirl ingest`: files into a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from rich.console import Console
from rich.markup import escape

from unirl.cli.output import AsJson, two_columns
from unirl.cli.signals import stop_on_signal

if TYPE_CHECKING:
    from datapipe import IngestReport

__all__ = ["ingest"]

EXIT_PROBLEMS: Final = 1
EXIT_BUSY: Final = 2
EXIT_OVER_BUDGET: Final = 3
DRY_RUN_SAMPLES: Final = 1000
MAX_PIXELS: Final = 89_478_485
"""As `datapipe.decode.DEFAULT_MAX_PIXELS`, which is slow to import."""


def ingest(
    sources: Annotated[
        list[str],
        typer.Argument(help="Folders, tars, tables, prompt files, URLs, or patterns: 's-{000..012}.tar'."),
    ],
    store: Annotated[Path, typer.Argument(help="Folder of the store; made if it is not there.")],
    format: Annotated[
        str | None,
        typer.Option(help="folder, classes, webdataset, table, prompts or hf; told apart when not given."),
    ] = None,
    map: Annotated[
        list[str] | None, typer.Option(help="OURS=THEIRS, such as caption=text. May be repeated.")
    ] = None,
    optional: Annotated[
        list[str] | None,
        typer.Option(help="image or caption: samples without one are fine. May be repeated."),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(help="A column without which a sample is bad, such as width. May be repeated."),
    ] = None,
    key_prefix: Annotated[
        str | None, typer.Option(help="Put before every key, with a slash; '' switches the default off.")
    ] = None,
    split_dot: Annotated[
        Literal["first", "last"], typer.Option(help="The dot at which the key of a tar member ends.")
    ] = "first",
    max_bad_fraction: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of bad samples that still is a success.")
    ] = 0.0,
    max_pixels: Annotated[int, typer.Option(min=1, help="Refuse pictures that claim more.")] = MAX_PIXELS,
    background: Annotated[
        str, typer.Option(help="Ground behind transparent pixels: a name, '#rrggbb' or R,G,B.")
    ] = "white",
    frames: Annotated[
        Literal["first", "all", "skip"],
        typer.Option(help="Of animations: the first frame, a row for each, or none of them."),
    ] = "first",
    duplicates: Annotated[
        Literal["once", "keep"], typer.Option(help="Samples that differ in their key alone.")
    ] = "once",
    trust: Annotated[bool, typer.Option("--trust", help="Read headers only, decode nothing.")] = False,
    resize: Annotated[
        str | None, typer.Option(help="512: the larger side at most; 384x256: width x height exactly.")
    ] = None,
    reencode: Annotated[str | None, typer.Option(help="Store pictures as jpeg:90, webp:90 or png.")] = None,
    tensor: Annotated[
        list[str] | None,
        typer.Option(help="Tensor column made on the way: 'pixels:uint8[3,224,224]'. May be repeated."),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Threads of this process, or processes of Ray.")
    ] = "local",
    workers: Annotated[int, typer.Option(min=1, help="Threads that read and decode, or tasks of Ray.")] = 2,
    commit_rows: Annotated[int, typer.Option(min=1, help="Samples in a commit.")] = 10_000,
    commit_minutes: Annotated[
        float, typer.Option(min=0.0, help="Minutes after which a commit ends as well.")
    ] = 1.0,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help=f"Look at the first {DRY_RUN_SAMPLES} samples and write nothing."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring pictures and captions into a store. Run it again to continue.

    Ends with 2 when another ingest is writing to the store, and with 3 when more samples are bad than
    --max-bad-fraction allows; the good ones are committed.

    Example: unirl ingest photos/ data/store
    Example: unirl ingest 's-{000..012}.tar' captions.parquet data/store --map caption=text
    """
    from datapipe import BadFractionError, StoreBusyError
    from datapipe import ingest as run_ingest
    from datapipe.report_page import write_report_page
    from storage import FeatureStore

    is_over = False
    with stop_on_signal() as should_stop:
        try:
            report = run_ingest(
                sources,
                store,
                format=format,
                column_map=_parse_map(map or []),
                optional=optional or (),
                required=require or (),
                key_prefix=key_prefix,
                split_dot=split_dot,
                max_bad_fraction=max_bad_fraction,
                max_pixels=max_pixels,
                background=background,
                frames=frames,
                duplicates=duplicates,
                trust=trust,
                resize=resize,
                reencode=reencode,
                tensors=tensor or (),
                engine=engine,
                workers=workers,
                commit_rows=commit_rows,
                commit_s=60.0 * commit_minutes,
                progress=not as_json,
                dry_run=DRY_RUN_SAMPLES if dry_run else None,
                should_stop=should_stop,
            )
        except StoreBusyError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(EXIT_BUSY) from error
        except BadFractionError as error:
            report, is_over = error.report, True
            Console(stderr=True, soft_wrap=True).print(escape(str(error)), style="red")
    if as_json:
        typer.echo(report.to_json())
    else:
        _print_report(report)
    if not report.is_dry_run:
        opened = FeatureStore.open(store)
        page = opened.path / "reports" / "ingest.html"
        write_report_page(opened, report, page)
        typer.echo(f"report: {page}", err=as_json)
    if is_over:
        raise typer.Exit(EXIT_OVER_BUDGET)
    if report.is_interrupted:
        typer.echo("stopped on request; run the same command again to continue", err=True)
        raise typer.Exit(EXIT_PROBLEMS)


def _parse_map(entries: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for entry in entries:
        ours, equals, theirs = entry.partition("=")
        if not (ours and equals and theirs):
            raise typer.BadParameter(f"--map {entry!r}: wanted OURS=THEIRS, such as caption=text")
        if ours in pairs:
            raise typer.BadParameter(f"--map names {ours!r} twice: {pairs[ours]!r} and {theirs!r}")
        pairs[ours] = theirs
    return pairs


def _print_report(report: IngestReport) -> None:
    table = two_columns()
    table.add_row("would be added" if report.is_dry_run else "added", str(report.num_added))
    table.add_row("there already", str(report.num_skipped))
    if report.num_finished_sources:
        table.add_row("finished sources", f"{report.num_finished_sources}, not read again")
    table.add_row("bad", f"{report.num_bad} ({report.bad_fraction:.2%})")
    table.add_row("duplicates", f"{report.num_duplicate_content}, {report.num_left_out} of them left out")
    table.add_row("turned upright", str(report.num_reoriented))
    table.add_row("formats", ", ".join(f"{name} {count}" for name, count in report.formats.items()) or "-")
    if report.codecs:
        table.add_row("codecs", ", ".join(f"{name} {count}" for name, count in report.codecs.items()))
    table.add_row("rate", f"{report.rows_per_s:.0f} samples/s over {report.wall_s:.1f} s")
    for kind, counts, examples in (
        ("bad", report.reasons, report.examples),
        ("note", report.notes, report.note_examples),
    ):
        for reason, count in counts.items():
            first = examples[reason][0]
            shown = f"{first.place}: {first.detail}" if first.detail else first.place
            table.add_row(f"{kind}: {reason}", escape(f"{count}, first {shown}"))
    Console(soft_wrap=True).print(table)
