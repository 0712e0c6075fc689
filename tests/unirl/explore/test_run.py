from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unirl.errors import ConfigError
from unirl.explore.run import number, open_run


def test_a_finished_run_is_read_whole(run_dir: Path) -> None:
    run = open_run(run_dir)
    assert run.header["recipe"] == "shapes"
    assert run.stages == ["text", "image"]
    assert run.directions == ["text", "image"]
    assert (len(run.train), len(run.evals)) == (8, 6)
    assert run.notes == []
    assert run.scores is not None and run.data is not None


def test_missing_parts_are_said(run_dir: Path, tmp_path: Path) -> None:
    shutil.copy(run_dir / "run.json", tmp_path / "run.json")
    header = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(header | {"store": "gone"}))
    run = open_run(tmp_path)
    said = " ".join(run.notes)
    assert all(part in said for part in ("metrics.jsonl", "summary.json", "galleries", "data store"))
    assert (run.scores, run.data, run.train) == (None, None, [])


def test_a_line_cut_by_a_kill_is_left_out_and_counted(tmp_path: Path) -> None:
    lines = '{"kind": "train", "step": 1}\n[1]\n\n{"kind": "train", "st'
    (tmp_path / "metrics.jsonl").write_text(lines)
    run = open_run(tmp_path)
    assert [line["step"] for line in run.train] == [1]
    assert any("2 of 3 lines" in note for note in run.notes)


def test_damaged_json_is_said(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    (tmp_path / "summary.json").write_text("[]")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}')
    said = " ".join(open_run(tmp_path).notes)
    assert "run.json cannot be read" in said
    assert "summary.json holds no JSON object" in said


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run directory"):
        open_run(tmp_path / "none")
    with pytest.raises(ConfigError, match="not a run directory"):
        open_run(tmp_path)


@pytest.mark.parametrize("value", [None, "3", True, math.nan, math.inf, [1]])
def test_what_is_no_finite_number_is_nan(value: object) -> None:
    assert math.isnan(number({"x": value}, "x"))
    assert math.isnan(number({}, "x"))


def test_exploring_needs_no_torch() -> None:
    script = "import sys, unirl.explore; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
