"""The report as a person sees it: in Chromium, on a desk and on a phone, light and dark."""

from __future__ import annotations

import runpy
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unirl.explore import write_report
from unirl.explore.report_server import ReportServer

ROOT = Path(__file__).parents[2]
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make_run = runpy.run_path(str(ROOT / "tests" / "run_directory.py"))["make_run"]
    folder = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        make_run(folder / f"seed-{seed}", prompts=seed, samples=2)
    run: Path = make_run(folder / "seed-0", caption=" <with a long remark> & more words than a card holds")
    write_report(run, others=[folder / "seed-1", folder / "seed-2"])
    return run


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'unirl[browser]'")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium, for example: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_report_fits_and_its_filters_work(run: Path, browser: Any, size: str, scheme: str) -> None:
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("requestfailed", lambda request: said.append(request.url))
    page.goto((run / "report.html").as_uri())

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in background.removeprefix("rgb(").removesuffix(")").split(","))
    assert (brightness > 3 * 200) == (scheme == "light")
    page.screenshot(path=run / f"report-{size}-{scheme}.png", full_page=True)

    shown = page.locator("#samples .card:visible")
    total = shown.count()
    page.select_option("select[name=prompt]", "p1")
    assert 0 < shown.count() < total
    assert set(shown.evaluate_all("cards => cards.map(card => card.dataset.prompt)")) == {"p1"}
    page.select_option("select[name=step]", "4")
    groups = page.locator("#samples .group:visible")
    assert set(groups.evaluate_all("groups => groups.map(group => group.dataset.step)")) == {"4"}
    page.reload()
    assert page.input_value("select[name=prompt]") == "p1", "what was chosen outlives a reload"
    page.select_option("select[name=prompt]", "")
    page.select_option("select[name=step]", "")
    page.fill("input[name=low]", "0.5")
    rewards = [float(value) for value in shown.evaluate_all("cards => cards.map(it => it.dataset.reward)")]
    assert 0 < len(rewards) < total and min(rewards) >= 0.5
    page.fill("input[name=low]", "")
    page.click("button[data-filter=stage][data-value=image]")
    assert 0 < shown.count() < total
    assert page.inner_text("#said") == f"{shown.count()} samples"
    page.close()
    assert said == []


def test_a_page_that_is_served_renews_itself(run: Path, browser: Any, tmp_path: Path) -> None:
    shutil.copy(run / "metrics.jsonl", tmp_path)
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    with ReportServer(tmp_path) as server:
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        page.goto(server.url)
        assert page.inner_text("#live") == "live"
        shutil.copy(run / "run.json", tmp_path)
        page.locator("header pre", has_text="unirl train shapes --seed 0").first.wait_for(timeout=60_000)
        page.close()
        server.stop()
        thread.join()
    assert errors == []
