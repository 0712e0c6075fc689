"""Three newcomers' walks: the commands of three how-tos, typed one after the other in an empty folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from storage import FeatureStore

HERE = Path(__file__).parent
DOCS = HERE.parents[2] / "docs"
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WALKS = ("own_data", "score_folder", "resume_compare")


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_types_the_commands_of_its_page_in_order(walk: str) -> None:
    page = (DOCS / f"howto_{walk}.md").read_text("utf-8")
    told = [line for block in BLOCK.findall(page) for line in block.splitlines() if line.strip()]
    typed = iter((HERE / f"{walk}.sh").read_text("utf-8").splitlines())
    assert len(told) >= 5
    assert [line for line in told if not any(line == command.removesuffix(" &") for command in typed)] == []


def walk(name: str, folder: Path) -> str:
    """Type a walk in a folder; returns what was said."""
    root = HERE.parents[2]
    paths = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ended = subprocess.run(
        ["bash", str(HERE / f"{name}.sh")],
        cwd=folder,
        env={
            **os.environ,
            **{"PYTHONPATH": paths, "PATH": programs, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
            **{"WALKS": str(HERE), "DOCS": str(DOCS)},
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_my_tars_and_a_prompt_list_to_a_first_rl_run(tmp_path: Path) -> None:
    assert "own_data" in {entry.name for entry in entry_points(group="unirl.recipes")}, "install unirl again"
    said = walk("own_data", tmp_path)
    assert "this run can start; nothing was trained" in said
    assert "report: runs/first/report.html" in said
    run = tmp_path / "runs" / "first"
    stages = json.loads((run / "summary.json").read_text())["runs"]
    assert [(stage["stage"], stage["steps"]) for stage in stages] == [("text", 1), ("image", 1)]
    drawn = FeatureStore.open(run / "experience").query(
        "SELECT DISTINCT prompt_key FROM samples WHERE kind = 'train' AND direction = 'image'"
    )
    assert any(key.startswith("prompts/") for key in drawn["prompt_key"].to_pylist()), "prompts are drawn"
    assert FeatureStore.open(tmp_path / "data" / "store").tensor_columns == {}, "my store is as it was"
    assert Image.open(tmp_path / "sheet.png").width > 500


@pytest.mark.slow
def test_score_my_folder_with_a_vlm_and_look_at_the_worst(tmp_path: Path) -> None:
    said = walk("score_folder", tmp_path)
    assert "12 pictures scored" in said
    scores = pq.read_table(tmp_path / "scores.parquet")
    values = scores["score"].to_pylist()
    assert len(values) == 12 and values == sorted(values) and all(0 < value < 1 for value in values)
    assert Image.open(tmp_path / "worst.png").width == 1016
    facts = json.loads(said[said.index("{\n") : said.index("\n}\n") + 2])
    assert facts["scored"] == 119 and len(facts["worst"]) == 8 and facts["not_scored"] == 0
    assert not (tmp_path / "photos" / "snapshots").exists()


@pytest.mark.slow
def test_my_run_was_killed_continue_and_compare(tmp_path: Path) -> None:
    said = walk("resume_compare", tmp_path)
    assert "text.algorithm" in said and "image.algorithm" in said, "what differs is named"
    for run in ("ppo", "grpo"):
        stages = json.loads((tmp_path / "runs" / run / "summary.json").read_text())["runs"]
        assert [stage["steps"] for stage in stages] == [2, 2]
    ends = json.loads(said[said.index("{\n") : said.index("\n}\n") + 2])
    last = json.loads((tmp_path / "runs" / "ppo" / "metrics.jsonl").read_text().splitlines()[-1])
    assert ends["image"]["eval/reward"] == pytest.approx(last["eval/reward"], abs=1e-6)
    assert Image.open(tmp_path / "curves.png").width > 300
