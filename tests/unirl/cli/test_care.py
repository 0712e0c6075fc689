"""The commands that take care of a store: what they print, and the numbers that they end with."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from storage import FeatureStore, StorageError
from unirl.cli.app import app
from unirl.errors import ConfigError


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def picture(index: int) -> bytes:
    pixels = np.random.default_rng(index).integers(0, 256, (8, 10, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    """Two parts of four pictures."""
    made = FeatureStore.create(tmp_path / "store")
    for start in (0, 4):
        made.append(
            {
                "key": f"k{i}",
                "blob": picture(i),
                "modality": "image",
                "width": 10 + i,
                "tensors": {"x": np.full(2, i, np.int8)},
            }
            for i in range(start, start + 4)
        )
    return made.refresh()


def flip_blob(store: FeatureStore, row: int) -> None:
    path = store.path / store.snapshot.parts[0].blobs.path
    at = int(store.part(0).keys("never").blob_offset[row])
    data = bytearray(path.read_bytes())
    data[at + 40] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_every_command_is_there_and_shows_an_example() -> None:
    for name in ("verify", "repair", "compact", "gc", "export", "import", "log", "diff", "tag"):
        result = call(name, "--help")
        assert result.exit_code == 0 and f"  unirl {name} " in result.output


def test_verify(store: FeatureStore) -> None:
    assert call("verify", store.path).output.startswith("ok: 8 files")
    deep = call("verify", store.path, "--deep")
    assert deep.exit_code == 0 and "8 blobs decode" in deep.output
    flip_blob(store, 2)
    result = call("verify", store.path)
    assert result.exit_code == 1 and "data.mdb" in result.output and "'k2'" in result.output
    found = json.loads(call("verify", store.path, "--json").output)
    assert found["ok"] is False and found["problems"][0]["path"].endswith("data.mdb")


def test_a_deep_check_finds_a_picture_that_was_bad_from_the_start(store: FeatureStore) -> None:
    store.append([{"key": "bad", "blob": picture(0)[:-30], "modality": "image+text"}])
    assert call("verify", store.path).exit_code == 0
    result = call("verify", store.path, "--deep", "--json")
    assert result.exit_code == 1
    assert "row 8, key 'bad', does not decode" in json.loads(result.output)["problems"][0]["text"]


def test_repair(store: FeatureStore) -> None:
    assert call("repair", store.path).output == "ok: nothing to repair\n"
    flip_blob(store, 2)
    planned = call("repair", store.path, "--dry-run")
    assert planned.exit_code == 1 and "lost: row 2, key 'k2'" in planned.output
    assert FeatureStore.open(store.path).snapshot.id == 2
    done = call("repair", store.path, "--json")
    report = json.loads(done.output)
    assert done.exit_code == 1 and [row["key"] for row in report["lost"]] == ["k2"]
    assert (store.path / report["folder"] / "lost_keys.jsonl").is_file()
    assert call("verify", store.path, "--deep").exit_code == 0
    assert call("repair", store.path).exit_code == 0
    listed = json.loads(call("quarantine", store.path, "--json").output)
    assert [row["key"] for row in listed] == ["k2"]


def test_repair_of_a_store_that_cannot_be_opened(store: FeatureStore) -> None:
    path = store.path / "snapshots" / "00000002.json"
    path.chmod(0o644)
    path.write_bytes(b"")
    assert isinstance(call("verify", store.path).exception, StorageError)
    result = call("repair", store.path)
    assert result.exit_code == 0 and "snapshot 1 stands in for it" in result.output
    assert "snapshot 3 is published, 0 rows lost; 1 file and" in result.output
    assert call("verify", store.path).exit_code == 0


def test_compact_and_gc(store: FeatureStore) -> None:
    assert call("compact", store.path).output == "snapshot 3: 2 parts became 1\n"
    assert call("compact", store.path).output == "snapshot 3: nothing to do\n"
    assert json.loads(call("compact", store.path, "--json").output)["parts"] == 1
    assert call("gc", store.path).output == "removed 0 files, 0 bytes\n"
    removed = json.loads(call("gc", store.path, "--keep-last", 1, "--grace-hours", 0, "--json").output)[
        "removed"
    ]
    assert "snapshots/00000000.json" in removed
    assert len(FeatureStore.open(store.path)) == 8 and call("verify", store.path).exit_code == 0


@pytest.mark.parametrize("format", ["webdataset", "parquet", "hf"])
def test_export_and_import(store: FeatureStore, tmp_path: Path, format: str) -> None:
    arguments = ["export", store.path, tmp_path / "out", "--format", format, "--where", "width > 11"]
    result = call(*arguments)
    assert result.exit_code == 0 and result.output.startswith("6 rows in ")
    assert isinstance(call(*arguments).exception, StorageError)
    result = call("import", tmp_path / "out", tmp_path / "copy")
    assert result.output == "snapshot 1: 6 rows added\n"
    copy = FeatureStore.open(tmp_path / "copy")
    assert copy.select().keys() == [f"k{i}" for i in range(2, 8)] and copy.blob(0) == picture(2)
    refused = call("import", tmp_path, tmp_path / "other").exception
    assert isinstance(refused, ConfigError) and "not an exported folder" in str(refused)
    assert not (tmp_path / "other").exists()


def test_log_diff_and_tags(store: FeatureStore) -> None:
    assert call("tag", store.path).output == "no tags\n"
    assert call("tag", store.path, "first", "--snapshot", 1).output == "first  1\n"
    store.delete("width = 10")
    shown = call("log", store.path).output
    assert "delete 1 rows" in shown and "first" in shown
    log = json.loads(call("log", store.path, "--json").output)
    assert [(one["snapshot"], one["rows"], one["tags"]) for one in log[:3]] == [
        (3, 7, []),
        (2, 8, []),
        (1, 4, ["first"]),
    ]
    assert "rows added: 4 (4, 5, 6, 7)\nrows removed: 1 (0)" in call("diff", store.path, "first", 3).output
    assert json.loads(call("diff", store.path, "first", 3, "--json").output)["rows_removed"] == [0]
    assert json.loads(call("tag", store.path, "now", "--json").output) == {"first": 1, "now": 3}
    assert call("tag", store.path, "first", "--remove").output == "now  3\n"
    assert isinstance(call("diff", store.path, "first", 3).exception, StorageError)


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify"],
        ["compact", "s", "--part-mb", "0"],
        ["gc", "s", "--keep-last", "0"],
        ["export", "s", "out", "--format", "zip"],
        ["export", "s"],
        ["import", "out"],
        ["diff", "s", "1"],
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    assert call(*arguments).exit_code == 2


def test_a_tag_without_a_name_ends_with_2(store: FeatureStore) -> None:
    assert call("tag", store.path, "--remove").exit_code == 2


def test_wrong_paths_are_library_errors(tmp_path: Path) -> None:
    for arguments in (["verify"], ["repair"], ["compact"], ["gc"], ["log"], ["tag"]):
        assert isinstance(call(*arguments, tmp_path / "none").exception, StorageError)


def test_a_store_behind_a_url_is_read(store: FeatureStore, tmp_path: Path) -> None:
    url = f"file://{store.path}"
    assert call("verify", url).exit_code == 0
    assert call("export", url, tmp_path / "out").output.startswith("8 rows in ")
    assert isinstance(call("compact", url).exception, StorageError)


def test_a_deep_check_tells_of_videos_that_it_cannot_decode(
    store: FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append([{"key": "clip", "blob": b"frames", "modality": "video+text", "width": 9}])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = call("verify", store.path, "--deep")
    assert result.exit_code == 0 and "8 blobs decode" in result.stdout
    assert "1 videos were not decoded" in result.stderr and "unirl[video]" in result.stderr
