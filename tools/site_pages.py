"""Hooks of mkdocs: pages of the site that live outside docs/, and links to source files that do not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

__all__ = ["on_files", "on_page_markdown"]

ROOT = Path(__file__).resolve().parents[1]
COPIED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s:]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that a repository keeps at its top."""
    from mkdocs.structure.files import File

    for source, target in COPIED.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep links inside the site; what points to a file of the repository becomes the file's name."""
    here = ROOT / "docs" / page.file.src_uri
    if page.file.src_uri in COPIED.values():
        here = ROOT / page.file.src_uri

    def mended(link: re.Match[str]) -> str:
        text, place = link.groups()
        path, _, anchor = place.partition("#")
        if not path:
            return link.group(0)
        target = (here.parent / path).resolve()
        name = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else ""
        if name in COPIED:
            name = f"docs/{COPIED[name]}"
        if name.startswith("docs/"):
            up = "../" * page.file.src_uri.count("/")
            return f"[{text}]({up}{name.removeprefix('docs/')}{'#' + anchor if anchor else ''})"
        return text if text.strip("`") == Path(name).name else f"{text} (`{name}`)"

    return _LINK.sub(mended, markdown)
