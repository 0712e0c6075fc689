"""Sources that are finished are not read again, until something about them changes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

from datapipe import BadFractionError, ingest
from datapipe.source_journal import fingerprint
from datapipe.sources import FolderSource, Item, TableSource, open_sources
from storage import FeatureStore


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8)).save(
        buffer, "PNG"
    )
    return buffer.getvalue()


def write_tables(folder: Path, num: int) -> list[Path]:
    folder.mkdir()
    for index in range(num):
        (folder / f"{index}.png").write_bytes(png(index))
        line = {"image": f"{index}.png", "caption": f"picture {index}"}
        (folder / f"t{index}.jsonl").write_text(json.dumps(line) + "\n")
    return sorted(folder.glob("*.jsonl"))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tables that were read, in order."""
    names: list[str] = []
    items = TableSource.items

    def counted(self: TableSource) -> Iterator[Item]:
        names.append(self.path.name)
        return items(self)

    monkeypatch.setattr(TableSource, "items", counted)
    return names


def test_a_finished_source_is_not_read_again(tmp_path: Path, opened: list[str]) -> None:
    tables = write_tables(tmp_path / "set", 3)
    assert ingest(tables, tmp_path / "store").num_added == 3
    assert opened == ["t0.jsonl", "t1.jsonl", "t2.jsonl"]
    again = ingest(tables, tmp_path / "store")
    assert (again.num_finished_sources, again.num_skipped, again.num_seen) == (3, 3, 3)
    assert len(opened) == 3
    tables[1].write_text(tables[1].read_text() + json.dumps({"image": "0.png", "caption": "new"}) + "\n")
    third = ingest(tables, tmp_path / "store")
    assert (third.num_finished_sources, third.num_added, third.num_skipped) == (2, 1, 3)
    assert opened[3:] == ["t1.jsonl"]


def test_other_rules_read_everything_again(tmp_path: Path, opened: list[str]) -> None:
    tables = write_tables(tmp_path / "set", 1)
    ingest(tables, tmp_path / "store")
    assert ingest(tables, tmp_path / "store", max_pixels=10_000).num_finished_sources == 0
    assert ingest(tables, tmp_path / "store", max_pixels=10_000).num_finished_sources == 1
    assert len(opened) == 2


def test_rows_that_are_gone_are_read_again(tmp_path: Path, opened: list[str]) -> None:
    tables = write_tables(tmp_path / "set", 2)
    ingest(tables, tmp_path / "store")
    FeatureStore.open(tmp_path / "store").delete("caption = 'picture 1'")
    again = ingest(tables, tmp_path / "store")
    assert (again.num_finished_sources, again.num_added) == (1, 1)
    FeatureStore.open(tmp_path / "store").restore(0)
    assert ingest(tables, tmp_path / "store").num_added == 2


def test_a_source_with_a_bad_sample_is_never_finished(tmp_path: Path, opened: list[str]) -> None:
    tables = write_tables(tmp_path / "set", 2)
    (tmp_path / "set" / "0.png").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(BadFractionError):
            ingest(tables, tmp_path / "store")
    assert opened == ["t0.jsonl", "t1.jsonl", "t0.jsonl"]
    (tmp_path / "set" / "0.png").write_bytes(png(0))
    assert ingest(tables, tmp_path / "store").num_added == 1


def test_what_was_finished_before_a_stop_counts(tmp_path: Path, opened: list[str]) -> None:
    tables = write_tables(tmp_path / "set", 4)
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) == 4

    first = ingest(tables, tmp_path / "store", should_stop=should_stop, commit_rows=1)
    assert first.is_interrupted and 2 <= first.num_added < 4
    again = ingest(tables, tmp_path / "store")
    assert (again.num_added, again.num_skipped) == (4 - first.num_added, first.num_added)
    assert again.num_finished_sources >= 1


def test_a_broken_journal_costs_time_only(tmp_path: Path, opened: list[str]) -> None:
    tables = write_tables(tmp_path / "set", 1)
    ingest(tables, tmp_path / "store")
    journal = tmp_path / "store" / "reports" / "sources.json"
    for content in ("", "[]", '{"a": 1}', "\xff"):
        journal.write_text(content, encoding="latin-1")
        report = ingest(tables, tmp_path / "store")
        assert (report.num_finished_sources, report.num_skipped, report.num_added) == (0, 1, 0)
    assert len(opened) == 5


def test_a_folder_changes_with_any_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.png").write_bytes(png(0))
    source = FolderSource(folder)
    first = fingerprint(source, "rules")
    assert first == fingerprint(FolderSource(folder), "rules") != fingerprint(source, "others")
    (folder / ".hidden").write_text("x")
    (folder / "gone.png").symlink_to(folder / "nowhere")
    second = fingerprint(source, "rules")
    assert second != first
    (folder / "deep" / "a.png").write_bytes(png(1))
    assert fingerprint(source, "rules") not in (first, second)


def test_a_remote_file_is_known_by_what_its_system_tells() -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/journal/t.jsonl", b'{"caption": "a"}\n')
    (source,) = open_sources(["memory://journal/t.jsonl"])
    first = fingerprint(source, "")
    assert first is not None and first == fingerprint(source, "")
    system.pipe("/journal/t.jsonl", b'{"caption": "b"}\n')
    assert fingerprint(source, "") != first
