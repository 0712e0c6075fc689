"""The data commands: what they print, and the numbers that they end with."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from datapipe import DataError, SourceError
from storage import FeatureStore, StorageError
from unirl.cli.data import COMMANDS, data_app


def call(*arguments: object) -> Result:
    return CliRunner().invoke(data_app, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    for index in range(4):
        pixels = np.random.default_rng(index).integers(0, 256, (8, 10 + index, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        (folder / f"{index}.png").write_bytes(buffer.getvalue())
        (folder / f"{index}.txt").write_text(f"picture [{index}]")
    return folder


def test_commands_are_named_as_typed() -> None:
    assert [command.__name__ for command in COMMANDS] == ["ingest", "info", "query", "show", "quarantine"]


def test_ingest_and_look(folder: Path, tmp_path: Path) -> None:
    result = call("ingest", folder, tmp_path / "store")
    assert result.exit_code == 0, result.output
    assert "png 4" in result.output
    assert "rows" in call("info", tmp_path / "store").output
    facts = json.loads(call("info", tmp_path / "store", "--json").output)
    assert (facts["rows"], facts["rows by format"], facts["columns"]["width"]) == (4, {"png": 4}, "BIGINT")
    assert "picture [3]" in (tmp_path / "store" / "reports" / "ingest.html").read_text()
    again = json.loads(call("ingest", folder, tmp_path / "store", "--json").stdout)
    assert (again["num_added"], again["num_skipped"]) == (0, 4)


def test_query_as_table_csv_and_json(folder: Path, tmp_path: Path) -> None:
    call("ingest", folder, tmp_path / "store")
    shown = call(
        "query", tmp_path / "store", "select key, caption from samples where width > 11 order by key"
    )
    assert "picture [2]" in shown.output and "2 rows" in shown.output and "picture [1]" not in shown.output
    rows = json.loads(call("query", tmp_path / "store", "width > 11", "--json").output)
    assert [row["key"] for row in rows] == ["2", "3"]
    table = call("query", tmp_path / "store", "select key, width from samples order by key", "--csv").output
    assert table == "key,width\n0,10\n1,11\n2,12\n3,13\n"
    assert len(json.loads(call("query", tmp_path / "store", "--limit", 3, "--json").output)) == 3
    assert call("query", tmp_path / "store", "--json", "--csv").exit_code == 2
    assert isinstance(call("query", tmp_path / "store", "widht > 3").exception, StorageError)


def test_a_limit_holds_for_a_select_too(folder: Path, tmp_path: Path) -> None:
    assert call("ingest", folder, tmp_path / "store").exit_code == 0
    result = call("query", tmp_path / "store", "SELECT key FROM samples ORDER BY key", "--limit", "1")
    assert "│ 0" in result.output and "│ 1" not in result.output
    assert result.output.endswith("1 row of 4; --limit 4 shows all\n")


def test_over_the_budget_ends_with_3(folder: Path, tmp_path: Path) -> None:
    (folder / "zero.png").write_bytes(b"")
    (folder / "zero.txt").write_text("nothing")
    result = call("ingest", folder, tmp_path / "store")
    assert result.exit_code == 3
    assert f"1 empty (first: {folder}/zero.png)" in result.stderr
    assert len(FeatureStore.open(tmp_path / "store")) == 4
    assert call("ingest", folder, tmp_path / "store", "--max-bad-fraction", 0.5).exit_code == 0
    listed = json.loads(call("quarantine", tmp_path / "store", "--json").output)
    assert [(row["key"], row["place"]) for row in listed] == [("zero", f"{folder}/zero.png")]
    assert "nothing is refused" in call("quarantine", tmp_path / "store", "--reason", "html").output
    assert "1 row\n" in call("quarantine", tmp_path / "store", "--reason", "empty").output


def test_options_reach_the_ingest(folder: Path, tmp_path: Path) -> None:
    lines = [
        {"img": "0.png", "words": "zero", "id": "a", "set": "sft"},
        {"img": "1.png", "id": "b", "set": "rl"},
    ]
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    maps = [part for pair in ("caption=words", "key=id", "split=set") for part in ("--map", pair)]
    options = ["--optional", "caption", "--key-prefix", "p", "--commit-rows", 1, "--workers", 1]
    result = call("ingest", folder / "t.jsonl", tmp_path / "store", *maps, *options)
    assert result.exit_code == 0, result.output
    rows = FeatureStore.open(tmp_path / "store").select().to_arrow(["key", "caption", "split"]).to_pylist()
    assert rows == [
        {"key": "p/a", "caption": "zero", "split": "sft"},
        {"key": "p/b", "caption": None, "split": "rl"},
    ]


def test_media_options_reach_the_ingest(folder: Path, tmp_path: Path) -> None:
    Image.new("RGBA", (40, 20)).save(folder / "clear.png")
    (folder / "clear.txt").write_text("nothing to see")
    options = ["--background", "0,0,255", "--resize", "20", "--reencode", "png", "--frames", "skip"]
    tensors = ["--tensor", "small:uint8[3,4,6]", "--tensor", "real:float32[3,2,2]"]
    more = ["--duplicates", "keep", "--engine", "local", "--commit-minutes", "0.5"]
    result = call("ingest", folder, tmp_path / "store", *options, *tensors, *more)
    assert result.exit_code == 0, result.output
    store = FeatureStore.open(tmp_path / "store")
    (row,) = store.select("key = 'clear'").rows.tolist()
    found = np.asarray(Image.open(io.BytesIO(store.blob(row))))
    assert found.shape == (10, 20, 3) and (found == (0, 0, 255)).all()
    assert store.tensor("small").gather([row])[0, :, 0, 0].tolist() == [0, 0, 255]
    assert store.tensor("real").gather([row])[0, :, 0, 0].tolist() == [-1, -1, 1]
    trusted = call("ingest", folder, tmp_path / "trusted", "--trust")
    assert trusted.exit_code == 0, trusted.output
    assert FeatureStore.open(tmp_path / "trusted").select("phash IS NULL").keys()
    assert isinstance(call("ingest", folder, tmp_path / "x", "--tensor", "a:int3[1]").exception, DataError)


def test_a_dry_run_writes_nothing(folder: Path, tmp_path: Path) -> None:
    result = call("ingest", folder, tmp_path / "store", "--dry-run")
    assert result.exit_code == 0 and "would be added" in result.output
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["ingest", "only-one"],
        ["ingest", "a", "b", "--map", "caption"],
        ["ingest", "a", "b", "--map", "caption=x", "--map", "caption=y"],
        ["ingest", "a", "b", "--max-bad-fraction", "2"],
        ["ingest", "a", "b", "--split-dot", "middle"],
        ["info"],
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    assert call(*arguments).exit_code == 2


def test_wrong_paths_are_library_errors(tmp_path: Path) -> None:
    assert isinstance(call("ingest", tmp_path / "none", tmp_path / "store").exception, SourceError)
    for command in ("info", "query", "quarantine"):
        assert isinstance(call(command, tmp_path / "none").exception, StorageError)


def test_sigterm_commits_what_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "0.png")
    for index in range(300):
        (folder / f"{index}.png").write_bytes((folder / "0.png").read_bytes())
        (folder / f"{index}.txt").write_text(f"picture {index}")
    script = "from unirl.cli.data import data_app; data_app()"
    command = [
        sys.executable,
        "-c",
        script,
        "ingest",
        str(folder),
        str(tmp_path / "store"),
        "--commit-rows",
        "20",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "store" / "snapshots").glob("0*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "run the same command again to continue" in errors
    rows = len(FeatureStore.open(tmp_path / "store"))
    assert 20 <= rows < 300
    assert call("ingest", folder, tmp_path / "store").exit_code == 0
    assert len(FeatureStore.open(tmp_path / "store")) == 300
