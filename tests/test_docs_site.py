"""The pages as a site: it builds without a warning, and shows nothing that it must fetch elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FETCHED = re.compile(
    r'<(?:script|img|iframe|link rel="(?:stylesheet|preconnect|preload)")[^>]*?(?:src|href)="(https?:)?//'
)


@pytest.mark.slow
def test_the_site_builds_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings_handlers.python", reason="needs mkdocs: pip install 'unirl[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {
        path.relative_to(tmp_path).as_posix(): path.read_text("utf-8") for path in tmp_path.rglob("*.html")
    }
    assert {name for name, page in pages.items() if FETCHED.search(page)} == set()
    assert "group_advantages" in pages["reference/algorithms.html"]
    assert "FeatureStore" in pages["reference/storage.html"]
