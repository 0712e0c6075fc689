"""The table of `unirl bench loader`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from storage import FeatureStore
from unirl.cli.app import app


@pytest.fixture
def store(tmp_path: Path) -> Path:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "PNG")
    made = FeatureStore.create(tmp_path / "store")
    made.append({"key": f"{n}", "blob": buffer.getvalue(), "caption": "x"} for n in range(8))
    return made.path


def test_the_table_names_the_stages_and_the_bottleneck(store: Path) -> None:
    arguments = ["bench", "loader", str(store), "--side", "8", "--batch-size", "4", "--batches", "3"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("12 samples in ")
    assert [line.split()[0] for line in lines[1:4]] == ["stage", "fetch", "decode"]
    assert lines[4].split(": ")[1] in {"fetch", "decode", "caller"}
    facts = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert (facts["batches"], [stage["name"] for stage in facts["stages"]]) == (3, ["fetch", "decode"])
