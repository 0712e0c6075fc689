"""`unirl export` and `import`: rows to other formats, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from unirl.cli.output import AsJson, StorePath, counted, progress_bar, tell
from unirl.errors import ConfigError

__all__ = ["COMMANDS", "export", "import_rows"]

EXPORT_FILE: Final = "export.json"


def export(
    store: StorePath,
    folder: Annotated[Path, typer.Argument(help="A new folder; it appears when it is whole.")],
    format: Annotated[
        Literal["webdataset", "parquet", "hf"],
        typer.Option(help="hf is what load_from_disk of datasets reads."),
    ] = "webdataset",
    where: Annotated[str | None, typer.Option(help="Only rows that meet an SQL condition.")] = None,
    file_mb: Annotated[int, typer.Option(min=1, help="Size of a file, in MiB.")] = 1024,
    as_json: AsJson = False,
) -> None:
    """Write rows for other programs. `unirl import` reads them back equal.

    Example: unirl export data/store out --format parquet --where "split = 'train'"
    """
    from storage import FeatureStore

    with progress_bar("exporting", as_json) as progress:
        opened = FeatureStore.open(store)
        if where is not None and not len(opened.select(where, limit=1)):
            raise typer.BadParameter(f"no row where {where}; `unirl info {store}` tells what is there")
        report = opened.export(where, folder, format, file_bytes=file_mb << 20, progress=progress)
    facts = {"path": str(report.path), "rows": report.rows, "files": report.files, "bytes": report.bytes}
    amount = f"{counted(report.rows, 'row')} in {counted(report.files, 'file')}, {report.bytes} bytes"
    tell(facts, f"{amount}: {report.path}", as_json)


def import_rows(
    folder: Annotated[Path, typer.Argument(help="What `unirl export` wrote.")],
    store: Annotated[Path, typer.Argument(help="Folder of the store; made if it is not there.")],
    part_mb: Annotated[int, typer.Option(min=1, help="Size of a part, in MiB.")] = 1024,
    as_json: AsJson = False,
) -> None:
    """Add the rows of an exported folder to a store, in one snapshot. Other files come in with ingest.

    Example: unirl import out data/copy
    """
    from storage import FeatureStore

    if not (folder / EXPORT_FILE).is_file():
        raise ConfigError(
            f"{folder}: this is not an exported folder (no {EXPORT_FILE} in it); "
            "files from elsewhere come in with `unirl ingest`"
        )
    with progress_bar("importing", as_json) as progress:
        opened = FeatureStore.create(store, exist_ok=True)
        snapshot = opened.import_rows(folder, part_bytes=part_mb << 20, progress=progress)
    added = snapshot.num_rows - opened.snapshot.num_rows
    tell(
        {"snapshot": snapshot.id, "rows": added},
        f"snapshot {snapshot.id}: {counted(added, 'row')} added",
        as_json,
    )


COMMANDS: Final[dict[str, Callable[..., None]]] = {"export": export, "import": import_rows}
