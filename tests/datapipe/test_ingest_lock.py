"""One ingest at a time into a store, and no lock that outlives its holder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from datapipe import DataError, StoreBusyError, ingest
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


def test_a_store_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    store = tmp_path / "store"
    ingest(prompts(tmp_path), store, optional=["image"])
    (store / "reports" / "ingest.lock").unlink()
    (store / "reports" / "ingest.lock").mkdir()  # root, too, cannot open it
    with pytest.raises(DataError, match=r"ingest.lock: cannot be written: .*; check that this user may"):
        ingest(prompts(tmp_path), store, optional=["image"])


@pytest.mark.parametrize("url", ["s3://bucket/store", Path("s3://bucket/store"), "memory://store"])
def test_a_store_behind_a_url_is_refused(
    tmp_path: Path, url: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = prompts(tmp_path)
    with pytest.raises(DataError, match="a store is written to a folder here"):
        ingest(source, url, optional=["image"])
    assert list(tmp_path.iterdir()) == [source]
