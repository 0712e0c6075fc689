"""`unirl verify`, `repair`, `compact` and `gc`: keeping a store whole and small."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import typer

from unirl.cli.output import AsJson, StoreFolder, StorePath, counted, progress_bar, tell

if TYPE_CHECKING:
    from storage import FeatureStore, RepairReport

__all__ = ["COMMANDS", "compact", "gc", "repair", "verify"]

EXIT_PROBLEMS: Final = 1
_MAX_PIXELS: Final = 1 << 31
_SHOWN_ROWS: Final = 20


def verify(
    store: StorePath,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also decode every image and video, and ask LMDB for every blob.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read everything and compare sizes, checksums and rows. Ends with 1 when something is wrong.

    Example: unirl verify data/store --deep
    """
    from storage import FeatureStore

    with progress_bar("checking", as_json) as progress:
        opened = FeatureStore.open(store)
        decoders = _decoders() if deep else None
        report = opened.verify(deep=decoders, progress=progress)
    if decoders is not None and "video" not in decoders:
        _tell_undecoded_videos(opened)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), ensure_ascii=False))
    elif report.ok:
        decoded = f", {report.decoded} blobs decode" if deep else ""
        typer.echo(f"ok: {report.files} files, {report.bytes} bytes, all checksums hold{decoded}")
    else:
        for problem in report.problems:
            typer.echo(f"{problem.path}: {problem.text}")
    if not report.ok:
        raise typer.Exit(EXIT_PROBLEMS)


def repair(
    store: StoreFolder,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what would be done, and write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Put broken files aside and publish a snapshot without the rows that are lost.

    Nothing is deleted: the files are in broken/ of the store, beside the list of lost keys. Ends with 1 when
    rows are lost, and in a dry run when there is anything to repair.

    Example: unirl repair data/store --dry-run
    """
    from storage import repair_store

    with progress_bar("checking", as_json) as progress:
        report = repair_store(store, dry_run=dry_run, progress=progress)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), ensure_ascii=False))
    else:
        _print_repair(report, dry_run=dry_run)
    if report.lost or (dry_run and not report.is_whole):
        raise typer.Exit(EXIT_PROBLEMS)


def compact(
    store: StoreFolder,
    part_mb: Annotated[int, typer.Option(min=1, help="Size of a part, in MiB.")] = 1024,
    as_json: AsJson = False,
) -> None:
    """Join small parts, split large ones, leave deleted rows out. Rows keep their numbers.

    The old parts stay until gc, for the snapshots that have them.

    Example: unirl compact data/store --part-mb 512
    """
    from storage import FeatureStore

    opened = FeatureStore.open(store)
    before = opened.refresh().snapshot
    after = opened.compact(max_part_bytes=part_mb << 20)
    facts = {"snapshot": after.id, "parts_before": len(before.parts), "parts": len(after.parts)}
    made = f"snapshot {after.id}: {len(before.parts)} parts became {len(after.parts)}"
    tell(facts, f"snapshot {after.id}: nothing to do" if after.id == before.id else made, as_json)


def gc(
    store: StoreFolder,
    keep_last: Annotated[
        int | None,
        typer.Option(min=1, help="Also remove old snapshots but so many; never one with a tag or in use."),
    ] = None,
    grace_hours: Annotated[
        float, typer.Option(min=0.0, help="What is younger stays: it may be the work of another machine.")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Remove files that no snapshot needs.

    Example: unirl gc data/store --keep-last 10
    """
    from storage import FeatureStore

    report = FeatureStore.open(store).gc(grace_s=grace_hours * 3600, keep_last=keep_last)
    facts = {"removed": report.removed, "bytes": report.bytes}
    tell(facts, f"removed {counted(len(report.removed), 'file')}, {report.bytes} bytes", as_json)


COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "verify": verify,
    "repair": repair,
    "compact": compact,
    "gc": gc,
}


def _decoders() -> dict[str, Callable[[memoryview], object]]:
    """What tells whether a blob is whole, by modality."""
    from datapipe.decode import check_image

    decoders: dict[str, Callable[[memoryview], object]] = {
        "image": partial(check_image, max_pixels=_MAX_PIXELS)
    }
    if importlib.util.find_spec("av") is not None:
        from datapipe.decode.video import scan_video

        decoders["video"] = partial(scan_video, max_pixels=_MAX_PIXELS)
    return decoders


def _tell_undecoded_videos(store: FeatureStore) -> None:
    if store.columns.get("modality") == "VARCHAR":
        count = len(store.select("starts_with(modality, 'video')"))
        if count:
            text = f"{count} videos were not decoded: PyAV is not installed; `pip install 'unirl[video]'`"
            typer.echo(text, err=True)


def _print_repair(report: RepairReport, *, dry_run: bool) -> None:
    if report.is_whole:
        typer.echo("ok: nothing to repair")
        return
    for note in report.notes:
        typer.echo(note)
    for path, text in report.broken.items():
        typer.echo(f"{path}: {text}")
    for name, count in report.missing.items():
        have = "has" if count == 1 else "have"
        typer.echo(
            f"{counted(count, 'row')} {have} no value of tensor {name} any more; "
            "compute it again with add_column"
        )
    for row in report.lost[:_SHOWN_ROWS]:
        typer.echo(f"lost: row {row.row}, key {row.key!r}: {row.reason}")
    if len(report.lost) > _SHOWN_ROWS:
        typer.echo(f"... {len(report.lost)} rows are lost in all")
    if dry_run:
        typer.echo("nothing was written; run without --dry-run to repair")
    else:
        typer.echo(
            f"snapshot {report.snapshot} is published, {counted(len(report.lost), 'row')} lost; "
            f"{counted(len(report.moved), 'file')} and lost_keys.jsonl are in {report.folder}"
        )
