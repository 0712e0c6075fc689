"""The blocks of code in the pages. Load it with `runpy.run_path`, since the tests are no package."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = tuple(sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]))
_FENCE = re.compile(
    r"^(?P<indent> *)(?:<!-- not run: (?P<not_run>[^>]+) -->\n *)?"
    r'```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^(?P=indent)```$',
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """One fenced block of a page."""

    language: str
    title: str
    """Name of the file that it is; empty for what is run."""
    code: str
    not_run: str
    """Why no test runs it; empty for what is run."""

    @property
    def first_line(self) -> str:
        return self.code.partition("\n")[0]


def blocks(page: Path) -> list[Block]:
    """In the order of the page."""
    return [
        Block(
            language=found["language"],
            title=found["title"] or "",
            code=textwrap.dedent(found["code"]),
            not_run=found["not_run"] or "",
        )
        for found in _FENCE.finditer(page.read_text("utf-8"))
    ]
