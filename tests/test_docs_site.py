"""The pages as a site: it builds without a warning, and shows nothing that it must fetch elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FETCHED = re.compile(
    r'<(?:script|img|iframe|link rel="(?:stylesheet|preconnect|preload)")[^>]*?(?:src|href)="(https?:)?//'
)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocstrings_handlers.python", reason="needs mkdocs: pip install 'unirl[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = {path.relative_to(site).as_posix(): path.read_text("utf-8") for path in site.rglob("*.html")}
    assert {name for name, page in pages.items() if FETCHED.search(page)} == set()
    assert "group_advantages" in pages["reference/algorithms.html"]
    assert "FeatureStore" in pages["reference/storage.html"]


def test_the_search_works_from_a_folder(site: Path) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'unirl[browser]'")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium, for example: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "index.html").as_uri())
        # Typed key by key: the page reads its field when a key is let go, not when the field is filled.
        page.locator("input.md-search__input").press_sequentially("group advantages")
        page.locator("a.md-search-result__link").first.wait_for(timeout=60_000)
        found = page.locator("a.md-search-result__link").evaluate_all("links => links.map(it => it.href)")
        browser.close()
    assert any("reference/algorithms.html" in link for link in found)
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
