from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "recipes" / "notebooks").glob("*.ipynb"))
SHOWN = {"01_your_data": (3, 4), "02_reward_scores": (14, 5), "03_why_did_this_prompt_change": (5, 3)}
"""Figures and tables of each."""


@pytest.fixture(scope="module")
def run(importable: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shapes recipe, every part of it cut down to a few steps."""
    settings = runpy.run_path(str(ROOT / "tests" / "integration" / "test_recipe.py"))["SETTINGS"]
    run = tmp_path_factory.mktemp("notebooks") / "run"
    command = [sys.executable, "-m", "recipes.shapes", "--run", str(run), *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return run


def _outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(
    path: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIRL_RUN", str(run))
    # A developer's settings and history stay out of the kernel, and the kernel out of them.
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    before = sorted(run.rglob("*"))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    nbformat.write(notebook, run.parent / path.name)

    outputs = _outputs(notebook)
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    tables = [output for output in outputs if "text/html" in output.get("data", {})]
    assert (len(pictures), len(tables)) == SHOWN[path.stem]
    assert not [output for output in outputs if output.output_type == "stream"]
    assert sorted(run.rglob("*")) == before, "a notebook writes nothing into the run that it looks at"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.cells[0].source.startswith("# ") and notebook.cells[0].source.splitlines()[0].endswith(
        "?"
    )
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
        assert len(cell.source.splitlines()) <= 12
