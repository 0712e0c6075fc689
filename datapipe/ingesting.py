"""Bring samples from files into a store: every picture decoded once, nothing lost, nothing doubled."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from datapipe.decode.image import DEFAULT_MAX_PIXELS
from datapipe.errors import DataError
from datapipe.ingest_lock import IngestLock
from datapipe.ingest_options import Engine, RowOptions, check_run
from datapipe.ingest_requests import remember_request
from datapipe.ingest_run import IngestRun
from datapipe.judge import Judge
from datapipe.media_rules import FramePolicy
from datapipe.progress import progress_bar
from datapipe.ray_engine import RayRun
from datapipe.report import BadFractionError, IngestReport
from datapipe.settling import DuplicatePolicy
from datapipe.source_journal import FinishedSources, SourceJournal
from datapipe.sources import FieldMap, Note, Source, open_sources
from datapipe.sources.webdataset import SplitDot
from storage import FeatureStore, StoreNotFoundError

__all__ = ["ingest"]

_URL: Final = re.compile(r"[a-z][a-z0-9+.-]+:/")  # a Path has lost one of two slashes


def ingest(
    source: str | Path | Sequence[str | Path],
    store: str | Path,
    *,
    format: str | None = None,
    column_map: Mapping[str, str] | None = None,
    optional: Sequence[str] = (),
    required: Sequence[str] = (),
    key_prefix: str | None = None,
    split_dot: SplitDot = "first",
    max_bad_fraction: float = 0.0,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    background: str | Sequence[int] = "white",
    frames: FramePolicy = "first",
    duplicates: DuplicatePolicy = "once",
    trust: bool = False,
    resize: str | None = None,
    reencode: str | None = None,
    tensors: Sequence[str] = (),
    engine: Engine = "local",
    workers: int = 2,
    commit_rows: int = 10_000,
    commit_s: float = 60.0,
    progress: bool = True,
    dry_run: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> IngestReport:
    """Read samples, check them completely and commit the good ones.

    Blobs are stored as they came; width and height in the index are those after rotation. A rerun
    continues: rows that the store has from the same place are skipped without being read, and a source that
    was read to its end without a bad sample is not read again until it changes. Samples that cannot be used
    go to the store's quarantine with place and reason, once.

    Args:
        source: Folders, tars, tables, or patterns of them.
        store: Folder of the store; made if it is not there.
        format: `folder`, `classes`, `webdataset`, `table`, `prompts` or `hf`; None tells them apart.
        column_map: Ours to theirs, as in {"caption": "text", "key": "id"}.
        optional: Of `image` and `caption`: may be absent without making a sample bad.
        required: Columns of the index: a sample in which one of them is null is bad.
        key_prefix: Put before each key, with a slash; None puts the name of a tar, and the split of a saved
            dataset, before the keys in it.
        split_dot: Whether a key in a tar ends at the `first` or the `last` dot of the file name.
        max_bad_fraction: Share of bad samples, 0..1, that is still a success.
        max_pixels: Pictures whose header claims more are quarantined.
        background: Ground behind transparent pixels where pictures are changed: `white`, `#rrggbb`, or
            R, G, B.
        frames: Of animations and files of several pages take the `first` frame, make `all` of them rows
            of their own, or refuse them (`skip`).
        duplicates: Store samples that differ in nothing but their key `once`, or `keep` them all.
        trust: Read headers only. Broken pixels are found when they are decoded, and no perceptual hash is
            recorded.
        resize: `512`: the larger side at most so long; `384x256`: width and height exactly.
        reencode: `jpeg:90`, `webp:90` or `png`: store pictures so. Resized ones are stored as JPEG if they
            came as JPEG, else as PNG.
        tensors: Tensor columns made on the way, such as `pixels:uint8[3,224,224]`.
        engine: `local` reads in threads of this process; `ray` in processes, here or on a cluster.
        workers: Threads that read and decode, or tasks of Ray at a time.
        commit_rows: Samples in a commit, at most,
        commit_s: and seconds from its first sample. A kill loses the work since the last commit.
        progress: Show a bar when standard error is a terminal.
        dry_run: Look at the first so many samples only, and write nothing.
        should_stop: Asked between samples; True commits what is whole and returns.

    Returns:
        The report, which also lies in `STORE/reports/` when something was committed.

    Raises:
        BadFractionError: When the bad share is over the budget, after the good rows are committed.
        DataError: When an argument cannot be used.
        SourceError: When a source cannot be read at all, before anything is written.
        StoreBusyError: When another ingest is writing to the store.
        StorageError: When the store cannot be used.
    """
    options = RowOptions(
        format=format,
        column_map=dict(column_map or {}),
        optional=tuple(sorted(optional)),
        required=tuple(sorted(required)),
        key_prefix=key_prefix,
        split_dot=split_dot,
        max_pixels=max_pixels,
        background=background if isinstance(background, str) else tuple(background),
        frames=frames,
        duplicates=duplicates,
        trust=trust,
        resize=resize,
        reencode=reencode,
        tensors=tuple(tensors),
    )
    if _URL.match(str(store)):
        raise DataError(f"{str(store)!r}: a store is written to a folder here; ingest into one, then copy it")
    check_run(
        max_bad_fraction=max_bad_fraction,
        engine=engine,
        workers=workers,
        commit_rows=commit_rows,
        commit_s=commit_s,
        dry_run=dry_run,
    )
    started = time.monotonic()
    specs = [source] if isinstance(source, str | Path) else list(source)
    fields = FieldMap(mapping=options.column_map)
    sources = open_sources(specs, format=format, fields=fields, key_prefix=key_prefix, split_dot=split_dot)
    with IngestLock() as lock:
        plan = _plan(store, sources, options, lock, is_written=dry_run is None)
        target, unread = plan.store, plan.unread
        run: IngestRun | RayRun
        if engine == "ray" and dry_run is None:
            run = RayRun(unread, plan.judge, workers=workers, should_stop=should_stop, duplicates=duplicates)
        else:
            run = IngestRun(
                target, unread, plan.judge, workers=workers, should_stop=should_stop, duplicates=duplicates
            )
        run.tally.num_skipped += plan.num_known
        run.tally.num_finished_sources += len(sources) - len(unread)
        num_commits = 0
        with progress_bar(unread, is_wanted=progress) as update:
            if dry_run is not None and isinstance(run, IngestRun):
                run.examine(dry_run, update)
            elif target is not None and plan.journal is not None:
                num_commits = run.commit_all(
                    target,
                    update,
                    commit_rows=commit_rows,
                    commit_s=commit_s,
                    committed=FinishedSources(plan.journal, target, unread, run.progress),
                )
        if dry_run is None or run.tally.num_seen < dry_run:
            _note_empty_sources(run, unread)
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
            remember_request(target, specs, options.as_asked())
        if report.is_over_budget:
            raise BadFractionError(report)
        return report


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What has to be read, by which rules, and where the rows go."""

    store: FeatureStore | None  # None in a dry run where there is no store yet
    journal: SourceJournal | None  # of that store
    unread: Sequence[Source]
    num_known: int  # samples of the other sources
    judge: Judge


def _plan(
    path: str | Path, sources: list[Source], options: RowOptions, lock: IngestLock, *, is_written: bool
) -> _Plan:
    """Find out what the store lacks. When it is written to, it is made and locked, after all checks."""
    media, rules = options.media_rules(), repr(options.as_asked())
    store = _store_at(path)
    if is_written and store is not None:
        lock.take(store.path)
        store = store.refresh()
    journal = None if store is None else SourceJournal(store, rules)
    unread, num_known = (sources, 0) if journal is None else journal.unfinished(sources)
    judge = options.judge(media, unread, {} if store is None else store.columns)
    if is_written and store is None:
        store = FeatureStore.create(path, exist_ok=True)
        lock.take(store.path)
        journal = SourceJournal(store, rules)
    return _Plan(store=store, journal=journal, unread=unread, num_known=num_known, judge=judge)


def _store_at(path: str | Path) -> FeatureStore | None:
    """The store, or None where there is none yet; one whose making was cut off is none yet."""
    try:
        return FeatureStore.open(path)
    except StoreNotFoundError:
        return None


def _note_empty_sources(run: IngestRun | RayRun, sources: Sequence[Source]) -> None:
    if run.tally.is_interrupted:
        return
    for source, progress in zip(sources, run.progress):
        if not progress.num_samples:
            note = Note(place=source.name, reason="no_samples", detail="there is nothing in it")
            run.tally.add_note(note, source.name)
