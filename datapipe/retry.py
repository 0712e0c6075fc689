"""Read the sources of what was refused once more, as the ingest that met it did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from datapipe.errors import DataError
from datapipe.ingest import ingest
from datapipe.ingest_requests import IngestRequest, read_requests
from datapipe.open_faults import OpenFaults
from datapipe.report import BadFractionError, IngestReport
from datapipe.sources.opener import open_sources
from storage import FeatureStore

__all__ = ["retry"]


def retry(
    store: str | Path,
    *,
    max_pixels: int | None = None,
    workers: int = 2,
    progress: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[IngestReport]:
    """Ingest again from all sources that have samples in the quarantine.

    What is good now is added, and its record is settled. What is bad still stays as it is.

    Args:
        store: Folder of the store.
        max_pixels: A budget other than that of the ingest that met the samples.
        workers: Threads that read and decode.
        progress: Show a bar when standard error is a terminal.
        should_stop: Asked between samples.

    Returns:
        One report for each ingest that was run again.

    Raises:
        DataError: When the quarantine is not empty, but nothing tells what was asked for.
        SourceError: When a source is not there any more.
    """
    opened = FeatureStore.open(store)
    faults = OpenFaults(opened)
    wanted = [request for request in read_requests(opened) if _has_faults(request, faults)]
    if faults.places and not wanted:
        raise DataError(
            f"{opened.path}: {len(faults.places)} places are in quarantine, but reports/requests.json names "
            "no ingest that met them; run `unirl ingest` on their sources again"
        )
    reports: list[IngestReport] = []
    for request in wanted:
        options = dict(request.options) | ({} if max_pixels is None else {"max_pixels": max_pixels})
        try:
            report = ingest(
                request.sources,
                store,
                workers=workers,
                progress=progress,
                should_stop=should_stop,
                **options,  # type: ignore[arg-type]
            )
        except BadFractionError as error:
            report = error.report
        reports.append(report)
        if report.is_interrupted:
            break
    return reports


def _has_faults(request: IngestRequest, faults: OpenFaults) -> bool:
    options = request.options
    sources = open_sources(request.sources, format=options.get("format"))  # type: ignore[arg-type]
    return any(faults.has(source) for source in sources)
