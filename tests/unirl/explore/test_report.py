from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from unirl.errors import ConfigError
from unirl.explore import write_report

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


class Page(HTMLParser):
    """Collects the elements, attributes and text of a page, and checks that elements close in order."""

    VOID = frozenset({"meta", "img", "input", "br", "link", "path", "use", "rect"})

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def html(run_dir: Path) -> str:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_elements_are_closed(page: Page) -> None:
    assert page.open == []


def test_nothing_is_loaded_from_elsewhere(page: Page) -> None:
    for tag, attrs in page.tags:
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            value = attrs.get(name)
            assert value is None or value.startswith(("data:image/", "#")), (tag, value)
    assert not page.all("link") and not page.all("iframe")
    assert re.search(r"url\((?!#)", page.text) is None


def test_the_header_says_how_to_repeat_the_run(page: Page) -> None:
    for text in (
        "shapes",
        "unirl train shapes --seed 0",
        "torch 2.13.0",
        "0123abc",
        "snapshot",
        '"lr": 0.0002',
    ):
        assert text in page.text


def test_the_headline_is_the_judge_before_and_after(page: Page) -> None:
    assert "25.0% → 50.0%" in page.text
    assert "25.0% → 75.0%" in page.text
    assert "+50.0 points" in page.text


def test_several_seeds_give_a_mean_with_its_spread(run_dir: Path, tmp_path: Path) -> None:
    shutil.copy(run_dir / "metrics.jsonl", tmp_path / "metrics.jsonl")
    rows = [
        {"stage": "text", "seed": seed, "judge_before": 0.5, "judge_after": after, "steps": 4}
        for seed, after in ((3, 0.55), (4, 0.65))
    ]
    (tmp_path / "summary.json").write_text(json.dumps({"runs": rows}))
    text = " ".join(Page(write_report(tmp_path).read_text(encoding="utf-8")).text.split())
    assert "mean of 2 seeds" in text
    assert "50.0% → 60.0%" in text
    assert "+10.0 points (+5.0 to +15.0)" in text
    assert "seed 4: judge 50.0% → 65.0%" in text


def test_every_section_has_its_figures(page: Page) -> None:
    for title in (
        "reward/mean",
        "kl/reference",
        "kl/coef",
        "kl by modality, nats per token",
        "entropy by modality, nats per token",
        "evaluation, direction text",
        "reward/length over steps",
        "reward/vlm, number of samples",
        "seconds per step",
        "memory, GiB",
    ):
        assert title in page.text
    assert len(page.all("svg")) >= 14


def test_ids_inside_the_figures_do_not_collide(html: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', html)
    clips = [name for name in ids if html.count(f"url(#{name})")]
    assert clips and len(set(clips)) == len(clips)


def test_galleries_can_be_filtered_by_kind_and_stage(page: Page) -> None:
    values = {(attrs["data-filter"], attrs["data-value"]) for attrs in page.all("button")}
    assert {("stage", "text"), ("stage", "image"), ("stage", "start")} <= values
    assert {("kind", "train"), ("kind", "eval")} <= values
    groups = [attrs for attrs in page.all("div") if attrs.get("class") == "group"]
    assert {(group["data-kind"], group["data-stage"]) for group in groups} == {
        ("eval", "start"),
        ("eval", "text"),
        ("eval", "image"),
        ("train", "text"),
        ("train", "image"),
    }
    assert len(page.all("img")) > 40


def test_the_health_of_the_data_is_shown(page: Page) -> None:
    assert "3 rows (rl 3); 1 refused (25.0%)" in page.text
    assert "image file is truncated" in page.text and "tar-1/bad.jpg" in page.text


def test_the_policy_of_the_page_lets_only_its_own_script_run(html: str, page: Page) -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    metas = {meta.get("http-equiv"): meta.get("content") for meta in page.all("meta")}
    assert f"script-src 'sha256-{digest}'" in str(metas["Content-Security-Policy"])


def test_what_a_run_holds_is_escaped(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    run = make_run(tmp_path / "run", steps=1, prompts=2, samples=1, caption=ATTACK)
    for name in ("run.json", "summary.json", "metrics.jsonl"):
        text = (run / name).read_text()
        evil = json.dumps(ATTACK)[1:-1]
        for word in ("shapes", "0123abc", "2.13.0", "unirl train shapes --seed 0", '"text"', "entropy/image"):
            quoted = f'"{evil}"' if word.startswith('"') else evil
            text = text.replace(word, quoted)
        (run / name).write_text(text)
    html = write_report(run).read_text(encoding="utf-8")
    page = Page(html)
    assert page.open == []
    assert len(page.all("script")) == 1
    assert "alert(1)" not in re.findall(r"<script>(.*?)</script>", html, re.DOTALL)[0]
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert all(str(attrs.get("src", "data:")).startswith("data:") for attrs in page.all("img"))
    assert f"shape 1{ATTACK}" in page.text


@pytest.mark.parametrize("kept", [("run.json",), ("metrics.jsonl",), ("experience",)])
def test_a_run_that_has_just_begun_is_shown_with_what_there_is(
    run_dir: Path, tmp_path: Path, kept: tuple[str, ...]
) -> None:
    for name in kept:
        source = run_dir / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert page.open == []
    assert "not there yet" in page.text


@pytest.mark.parametrize("store", ["experience", "store"])
def test_a_store_with_a_missing_part_is_said(run_dir: Path, tmp_path: Path, store: str) -> None:
    run = shutil.copytree(run_dir, tmp_path / "run")
    header = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(header | {"store": "elsewhere"}))
    part = min((run / store / "index").glob("*.parquet"))
    part.unlink()
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    assert "cannot be read" in text and part.name in text
    assert "reward/mean" in text


def test_one_step_with_nan_everywhere_is_shown(tmp_path: Path) -> None:
    line = {"kind": "train", "stage": "text", "step": 1}
    line |= dict.fromkeys(("wall_s", "reward/mean", "kl/text", "time/rollout_s"), math.nan)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "\u2013 \u2192 \u2013" in page.text
    assert page.open == []


def test_the_same_run_gives_the_same_page(run_dir: Path, html: str) -> None:
    assert write_report(run_dir).read_text(encoding="utf-8") == html
    assert sorted(entry.name for entry in run_dir.glob(".report*")) == []


def test_a_wrong_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run directory"):
        write_report(tmp_path / "nowhere")
