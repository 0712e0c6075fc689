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


ARGUMENTS = ("--side", "8", "--batch-size", "4", "--batches", "3")
STAGES = ["fetch", "decode", "collate"]


def test_the_table_names_the_stages_and_the_bottleneck(store: Path) -> None:
    arguments = ["bench", "loader", str(store), *ARGUMENTS]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("12 samples in ")
    assert [line.split()[0] for line in lines[1:5]] == ["stage", *STAGES]
    assert lines[5].split(": ")[1] in {*STAGES, "caller"}
    facts = json.loads(CliRunner().invoke(app, [*arguments, "--raw", "--json"]).output)
    assert (facts["batches"], [stage["name"] for stage in facts["stages"]]) == (3, STAGES)


def test_bad_samples_are_counted_by_reason(store: Path) -> None:
    FeatureStore.open(store).append([{"key": "broken", "blob": b"\0no picture"}])
    arguments = ["bench", "loader", str(store), *ARGUMENTS]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code != 0
    result = CliRunner().invoke(app, [*arguments, "--max-bad", "1"])
    assert result.exit_code == 0, result.output
    assert "bad: 11.11% of the samples: not_an_image 1" in result.output
