"""Bring samples from files into a store: every picture decoded once, nothing lost, nothing doubled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from datapipe.decode.image import DEFAULT_MAX_PIXELS
from datapipe.errors import DataError
from datapipe.ingest_run import IngestRun
from datapipe.judge import Judge
from datapipe.progress import progress_bar
from datapipe.report import BadFractionError, IngestReport
from datapipe.sources import FieldMap, open_sources
from datapipe.sources.column_kinds import ColumnKinds
from datapipe.sources.webdataset import SplitDot
from storage import FeatureStore

__all__ = ["ingest"]

_COMMIT_S: Final = 60.0  # a kill loses at most the work of so long, however slow the source is
_OPTIONAL: Final = frozenset({"image", "caption"})


def ingest(
    source: str | Path | Sequence[str | Path],
    store: str | Path,
    *,
    format: str | None = None,
    column_map: Mapping[str, str] | None = None,
    optional: Sequence[str] = (),
    key_prefix: str | None = None,
    split_dot: SplitDot = "first",
    max_bad_fraction: float = 0.0,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    workers: int = 2,
    commit_rows: int = 10_000,
    progress: bool = True,
    dry_run: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> IngestReport:
    """Read samples, check them completely and commit the good ones.

    Blobs are stored as they came; width and height in the index are those after rotation. A rerun
    continues: rows that the store has from the same place are skipped without being read. Samples that
    cannot be used go to the store's quarantine with place and reason, once.

    Args:
        source: Folders, tars, tables, or patterns of them.
        store: Folder of the store; made if it is not there.
        format: `folder`, `webdataset`, `table` or `hf`; None tells them apart.
        column_map: Ours to theirs, as in {"caption": "text", "key": "id"}.
        optional: Of `image` and `caption`: may be absent without making a sample bad.
        key_prefix: Put before each key; None puts the name of a tar, and the split of a saved
            dataset, before the keys in it.
        split_dot: Whether a key in a tar ends at the `first` or the `last` dot of the file name.
        max_bad_fraction: Share of bad samples, 0..1, that is still a success.
        max_pixels: Pictures whose header claims more are quarantined.
        workers: Threads that read and decode.
        commit_rows: Samples in a commit, at most; a minute also ends one. A kill loses the work since.
        progress: Show a bar when standard error is a terminal.
        dry_run: Look at the first so many samples only, and write nothing.
        should_stop: Asked between samples; True commits what is whole and returns.

    Returns:
        The report, which also lies in `STORE/reports/` when something was committed.

    Raises:
        BadFractionError: When the bad share is over the budget, after the good rows are committed.
        SourceError: When a source cannot be read at all, before anything is written.
        StorageError: When the store cannot be used.
    """
    _check_arguments(optional, max_bad_fraction, max_pixels, workers, commit_rows, dry_run)
    started = time.monotonic()
    specs = [source] if isinstance(source, str | Path) else list(source)
    fields = FieldMap(mapping=dict(column_map or {}))
    sources = open_sources(specs, format=format, fields=fields, key_prefix=key_prefix, split_dot=split_dot)
    kinds = ColumnKinds()
    for opened in sources:
        opened.observe_columns(kinds)
    target = _open_target(Path(store), is_made=dry_run is None)
    kinds.fit_store({} if target is None else target.columns)
    judge = Judge(kinds=kinds, optional=frozenset(optional), max_pixels=max_pixels)
    run = IngestRun(target, sources, judge, workers=workers, should_stop=should_stop)
    num_commits = 0
    with progress_bar(sources, is_wanted=progress) as update:
        if dry_run is not None:
            run.examine(dry_run, update)
        elif target is not None:
            num_commits = run.commit_all(target, update, commit_rows=commit_rows, commit_s=_COMMIT_S)
    report = run.tally.freeze(
        sources=tuple(opened.name for opened in sources),
        store=str(store),
        snapshot=0 if target is None else target.refresh().snapshot.id,
        max_bad_fraction=max_bad_fraction,
        is_dry_run=dry_run is not None,
        wall_s=time.monotonic() - started,
    )
    if num_commits and target is not None:
        report.write(target.path / "reports")
    if report.is_over_budget:
        raise BadFractionError(report)
    return report


def _open_target(path: Path, *, is_made: bool) -> FeatureStore | None:
    if is_made:
        return FeatureStore.create(path, exist_ok=True)
    return FeatureStore.open(path) if path.exists() else None


def _check_arguments(
    optional: Sequence[str],
    max_bad_fraction: float,
    max_pixels: int,
    workers: int,
    commit_rows: int,
    dry_run: int | None,
) -> None:
    unknown = set(optional) - _OPTIONAL
    if unknown:
        raise DataError(f"optional holds {sorted(unknown)}; wanted image, caption or both")
    if not 0 <= max_bad_fraction <= 1:
        raise DataError(f"max_bad_fraction is {max_bad_fraction}, wanted a share from 0 to 1")
    for name, value in (
        ("max_pixels", max_pixels),
        ("workers", workers),
        ("commit_rows", commit_rows),
        ("dry_run", dry_run),
    ):
        if value is not None and value < 1:
            raise DataError(f"{name} is {value}, wanted 1 or more")
