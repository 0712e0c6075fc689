"""One ingest at a time into a store, and no lock that outlives its holder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from datapipe import StoreBusyError, ingest
from datapipe.ingest_lock import IngestLock


def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "\n".join(json.dumps({"key": str(n), "caption": f"prompt {n}"}) for n in range(20)) + "\n"
    )
    return path


def test_the_second_is_told_who_the_first_is(tmp_path: Path) -> None:
    store = tmp_path / "store"
    ingest(prompts(tmp_path), store, optional=["image"])
    with IngestLock() as first:
        first.take(store)
        first.take(store)
        with pytest.raises(StoreBusyError, match=rf"process {os.getpid()} on .*, since 20.*; wait until"):
            ingest(prompts(tmp_path), store, optional=["image"])
        assert ingest(prompts(tmp_path), store, optional=["image"], dry_run=5).is_dry_run
    assert ingest(prompts(tmp_path), store, optional=["image"]).num_skipped == 20


def test_an_ingest_that_failed_lets_go(tmp_path: Path) -> None:
    store = tmp_path / "store"
    ingest(prompts(tmp_path), store, optional=["image"])
    (tmp_path / "prompts.jsonl").write_text('{"key": "x"}\n')
    with pytest.raises(ValueError, match="cannot be used"):
        ingest(tmp_path / "prompts.jsonl", store, optional=["image"])
    assert ingest(prompts(tmp_path), store, optional=["image"]).num_skipped == 20
