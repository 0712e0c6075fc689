from __future__ import annotations

import re
from xml.etree import ElementTree

from matplotlib.figure import Figure

from unirl.explore import plots
from unirl.explore.svg import figure_svg


def drawn(title: str, salt: str) -> str:
    figure = Figure(figsize=(2, 1))
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color=plots.INK)
    axes.grid(color=plots.GRID)
    axes.set_title(title, parse_math=False)
    return str(figure_svg(figure, salt))


def test_the_page_decides_about_ink_grid_and_size() -> None:
    svg = drawn("title", "a")
    assert plots.INK not in svg and plots.GRID not in svg
    assert "currentColor" in svg and "var(--grid)" in svg
    assert re.match(r"<svg[^>]*>", svg) and not re.match(r"<svg[^>]* width=", svg)
    assert "http" not in svg


def test_text_stays_text_and_is_escaped() -> None:
    svg = drawn("a <script>alert(1)</script> & b", "a")
    assert "<script" not in svg
    tree = ElementTree.fromstring(svg.replace("xlink:href", "href"))
    assert any("a <script>alert(1)</script> & b" in (element.text or "") for element in tree.iter())


def test_ids_follow_the_salt_and_nothing_else() -> None:
    ids = [set(re.findall(r' id="([^"]+)"', drawn("x", salt))) for salt in ("a", "a", "b")]
    assert ids[0] == ids[1]
    assert ids[0] and not ids[0] & ids[2]
