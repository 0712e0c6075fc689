"""What ingests of a store were asked for, so that `unirl quarantine --retry` can ask again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from datapipe.sources.remote import is_url, shown_url
from storage import FeatureStore

__all__ = ["IngestRequest", "read_requests", "remember_request"]

_FILE: Final = "requests.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestRequest:
    """What an ingest was asked for."""

    sources: tuple[str, ...]  # paths and patterns, absolute; URLs without secrets
    options: Mapping[str, object] = field(default_factory=dict)  # of ingest(), those that decide about rows


def remember_request(store: FeatureStore, specs: Sequence[str | Path], options: Mapping[str, object]) -> None:
    """Keep what was asked for in `STORE/reports/requests.json`. Losing the file loses the retry alone."""
    sources = tuple(_absolute(str(spec)) for spec in specs)
    request = IngestRequest(sources=sources, options=json.loads(json.dumps(dict(options))))
    known = read_requests(store)
    if request in known:
        return
    path = store.path / "reports" / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    content = [{"sources": entry.sources, "options": entry.options} for entry in (*known, request)]
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_requests(store: FeatureStore) -> list[IngestRequest]:
    """What was asked for so far, oldest first; nothing where the file is lost or broken."""
    try:
        content = json.loads((store.path / "reports" / _FILE).read_text(encoding="utf-8"))
        return [
            IngestRequest(sources=tuple(entry["sources"]), options=dict(entry["options"]))
            for entry in content
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _absolute(spec: str) -> str:
    parts = spec.split("::")
    return "::".join(shown_url(part) if is_url(part) else os.path.abspath(part) for part in parts)  # noqa: PTH100
