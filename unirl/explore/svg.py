"""Matplotlib figures as SVG that belongs to the page around it."""

from __future__ import annotations

import io
import re

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from unirl.explore import plots

__all__ = ["figure_svg"]


def figure_svg(figure: Figure, salt: str) -> Markup:
    """Return a figure as an inline SVG that takes its colours and font from the page.

    Args:
        figure: Drawn with `plots.INK` and `plots.GRID` where it should follow the page.
        salt: Another text for each figure of a page, so that the ids inside differ.

    Returns:
        Markup, since Matplotlib escapes every text in it.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace(plots.INK, "currentColor").replace(plots.GRID, "var(--grid)")
    return Markup(svg)
