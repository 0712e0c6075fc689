"""`unirl quarantine`: list, save, try again."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from storage import FeatureStore
from unirl.cli.app import app


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def png(color: str, size: int = 8) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), color).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "set"
    root.mkdir()
    for name, data in (("good", png("red")), ("cut", png("blue")[:50]), ("large", png("green", 40))):
        (root / f"{name}.png").write_bytes(data)
        (root / f"{name}.json").write_text(json.dumps({"words": name}))
    return root


def ingest(folder: Path, store: Path) -> None:
    result = call("ingest", folder, store, "--map", "caption=words", "--max-pixels", 1000)
    assert result.exit_code == 3, result.output


def test_list_filter_and_count(folder: Path, tmp_path: Path) -> None:
    ingest(folder, tmp_path / "s")
    output = call("quarantine", tmp_path / "s").output
    assert "1 truncated" in output and "1 too_many_pixels" in output and "2 rows" in output
    listed = json.loads(call("quarantine", tmp_path / "s", "--reason", "truncated", "--json").output)
    assert [row["key"] for row in listed] == ["cut"]


def test_retry_with_a_repaired_file_and_another_budget(folder: Path, tmp_path: Path) -> None:
    ingest(folder, tmp_path / "s")
    (folder / "cut.png").write_bytes(png("blue"))
    assert "1 added, 1 bad still" in call("quarantine", tmp_path / "s", "--retry").output
    result = call("quarantine", tmp_path / "s", "--retry", "--max-pixels", 5000)
    assert "1 added, 0 bad still" in result.output and "nothing is refused" in result.output
    store = FeatureStore.open(tmp_path / "s")
    assert sorted(store.select().column("caption").to_pylist()) == ["cut", "good", "large"]
    assert "4 rows" in call("quarantine", tmp_path / "s", "--all").output
    assert "0 added, 0 bad still" in call("quarantine", tmp_path / "s", "--retry").output


def test_retry_needs_to_know_the_sources(folder: Path, tmp_path: Path) -> None:
    ingest(folder, tmp_path / "s")
    (tmp_path / "s" / "reports" / "requests.json").unlink()
    result = call("quarantine", tmp_path / "s", "--retry")
    assert result.exit_code != 0 and "2 places are in quarantine" in str(result.exception or result.output)


def test_retry_goes_on_when_a_source_is_gone(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "e.png").write_bytes(b"")
    (other / "e.json").write_text('{"words": "e"}')
    for source in (other, folder):
        ingest(source, tmp_path / "s")
    (other / "e.png").unlink()
    (other / "e.json").unlink()
    other.rmdir()
    result = call("quarantine", tmp_path / "s", "--retry", "--max-pixels", 5000)
    assert result.exit_code == 0 and "1 source gone" in result.output, result.output
    reasons = FeatureStore.open(tmp_path / "s").quarantined().column("reason").to_pylist()
    assert any(reason.startswith("empty") for reason in reasons)


def test_saved_names_never_leave_the_folder(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path / "s")
    with store.writer(message="m") as writer:
        for key in ("../../evil", "/etc/passwd", "a\nb", "x" * 300, "", "..", "c:\\d\0"):
            writer.quarantine(key=key, place="p", reason="html: page", data=b"<html>")
        writer.quarantine(key="none", place="p", reason="caption_none: null", data=None)
    result = call("quarantine", tmp_path / "s", "--save", tmp_path / "out" / "deep")
    assert result.exit_code == 0 and "7 files written" in result.output
    assert {path.parent for path in tmp_path.rglob("*.html")} == {tmp_path / "out" / "deep"}
    assert len(list((tmp_path / "out" / "deep").iterdir())) == 7
