"""The report page stands alone, and shows what was found."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datapipe import BadFractionError, ingest
from datapipe.report_page import write_report_page
from storage import FeatureStore


class Checked(HTMLParser):
    """Every tag that is opened is closed."""

    VOID = frozenset({"meta", "img", "br", "link", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_of_everything(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for index in range(60):
        pixels = np.full((10 + index, 20, 3), index, np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:02d}.png")
        (folder / f"{index:02d}.txt").write_text(f"<b>picture</b> {index}")
    (folder / "zero.png").write_bytes(b"")
    (folder / "zero.txt").write_text("x")
    (folder / "odd.zip").write_bytes(b"")
    try:
        ingest(folder, tmp_path / "store")
    except BadFractionError as error:
        report = error.report
    path = tmp_path / "page" / "report.html"
    write_report_page(FeatureStore.open(tmp_path / "store"), report, path)
    page = path.read_text()
    checked = Checked()
    checked.feed(page)
    assert checked.open == []
    assert not re.search(r"(src|href)=\"(?!data:)", page) and "<script" not in page
    assert page.count("data:image/jpeg;base64,") == 24
    assert "&lt;b&gt;picture&lt;/b&gt;" in page and "<b>picture</b>" not in page
    assert f"{folder}/zero.png" in page and "odd.zip" in page
    assert page.count("<svg") == 4 and "10 to\n69, median 39.5" in page and "always 20" in page


def test_a_store_without_pictures(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"caption": "only text"}))
    report = ingest(tmp_path / "t.jsonl", tmp_path / "store", optional=["image"])
    write_report_page(FeatureStore.open(tmp_path / "store"), report, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Caption length" in page and "data:image" not in page


def test_an_empty_store(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("image,caption\n")
    report = ingest(tmp_path / "t.csv", tmp_path / "store")
    write_report_page(FeatureStore.open(tmp_path / "store"), report, tmp_path / "report.html")
    assert "0 rows in the store" in (tmp_path / "report.html").read_text()


def test_videos_have_thumbnails_and_what_cannot_be_decoded_has_none(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    folder = tmp_path / "set"
    folder.mkdir()
    with av.open(str(folder / "a.mp4"), "w") as output:
        stream = output.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for level in range(12):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 20 * level, np.uint8), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    (folder / "a.txt").write_text("it grows lighter")
    report = ingest(folder, tmp_path / "store")
    assert (report.num_videos, report.formats, report.modes) == (1, {"mp4": 1}, {})
    write_report_page(FeatureStore.open(tmp_path / "store"), report, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 1 and "Duration of videos in seconds" in page
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 50, 3), dtype=np.uint8)).save(
        buffer, "PNG"
    )
    (folder / "cut.png").write_bytes(buffer.getvalue()[:2000])
    (folder / "cut.txt").write_text("half of it")
    (folder / "a.mp4").unlink()
    (folder / "a.txt").unlink()
    trusted = ingest(folder, tmp_path / "trusted", trust=True)
    assert trusted.num_added == 1
    write_report_page(FeatureStore.open(tmp_path / "trusted"), trusted, tmp_path / "page.html")
    assert "data:image/jpeg" not in (tmp_path / "page.html").read_text()
