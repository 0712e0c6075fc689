"""Read the sources of what was refused once more, as the ingest that met it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from datapipe.errors import DataError, SourceError
from datapipe.ingest_requests import IngestRequest, read_requests
from datapipe.ingesting import ingest
from datapipe.open_faults import OpenFaults
from datapipe.report import BadFractionError, IngestReport
from datapipe.sources import Source
from datapipe.sources.opener import open_sources
from storage import FeatureStore

__all__ = ["Retried", "retry"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Retried:
    """What came of reading the sources of the quarantine again."""

    reports: tuple[IngestReport, ...]  # one for each ingest that was run again
    gone: tuple[str, ...]  # sources that cannot be read any more, each with the reason

    @property
    def num_added(self) -> int:
        return sum(report.num_added for report in self.reports)

    @property
    def num_bad(self) -> int:
        return sum(report.num_bad for report in self.reports)


def retry(
    store: str | Path,
    *,
    max_pixels: int | None = None,
    workers: int = 2,
    progress: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
) -> Retried:
    """Ingest again from all sources that have samples in the quarantine.

    What is good now is added, and its record is settled. What is bad still, or lies in a source that is
    gone, stays as it is.

    Args:
        store: Folder of the store.
        max_pixels: A budget other than that of the ingest that met the samples.
        workers: Threads that read and decode.
        progress: Show a bar when standard error is a terminal.
        should_stop: Asked between samples.

    Raises:
        DataError: When the quarantine is not empty, but nothing tells what was asked for.
    """
    opened = FeatureStore.open(store)
    faults = OpenFaults(opened)
    gone: list[str] = []
    requests = [_without_gone(request, gone) for request in read_requests(opened)]
    wanted = [request for request in requests if request.sources and _has_faults(request, faults)]
    if faults.places and not wanted and not gone:
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
        except SourceError as error:
            gone.append(str(error))
            continue
        reports.append(report)
        if report.is_interrupted:
            break
    return Retried(reports=tuple(reports), gone=tuple(dict.fromkeys(gone)))


def _without_gone(request: IngestRequest, gone: list[str]) -> IngestRequest:
    """The request for the sources that are there; what the others lack is added to gone."""
    there: list[str] = []
    for spec in request.sources:
        try:
            _open([spec], request)
        except SourceError as error:
            gone.append(str(error))
        else:
            there.append(spec)
    return replace(request, sources=tuple(there))


def _has_faults(request: IngestRequest, faults: OpenFaults) -> bool:
    return any(faults.has(source) for source in _open(request.sources, request))


def _open(specs: Sequence[str], request: IngestRequest) -> list[Source]:
    return open_sources(specs, format=request.options.get("format"))  # type: ignore[arg-type]
