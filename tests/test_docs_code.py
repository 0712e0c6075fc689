"""The code in the pages: commands parse, imports exist, and the pages that lead somewhere are run."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from unirl.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RUN = ("tutorial.md", "howto_reward.md", "howto_model.md")
"""Pages whose blocks are run from top to bottom in an empty folder. A block with a title is a file."""
OURS = ("storage", "datapipe", "unirl", "recipes")
_FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_PLACEHOLDER = re.compile(r"\.\.\.|\{|\$|<|\[")


class Block(NamedTuple):
    language: str
    title: str
    code: str


def _blocks(page: Path) -> list[Block]:
    return [Block(*found.groups(default="")) for found in _FENCE.finditer(page.read_text("utf-8"))]


def _all(language: str) -> Iterator[Any]:
    for page in PAGES:
        for number, block in enumerate(_blocks(page)):
            if block.language == language:
                yield pytest.param(block.code, id=f"{page.relative_to(ROOT)}-{number}")


@pytest.mark.parametrize("code", _all("python"))
def test_python_parses_and_what_it_imports_of_ours_exists(code: str) -> None:
    if code.startswith(">>> "):
        code = "".join(example.source for example in doctest.DocTestParser().get_examples(code))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
            module = importlib.import_module(str(node.module))
            for name in node.names:
                where = f"{node.module}.{name.name}"
                known = hasattr(module, name.name) or importlib.util.find_spec(where) is not None
                assert known, f"there is no {where}"


def _commands() -> Iterator[Any]:
    for page in PAGES:
        for block in _blocks(page):
            if block.language not in {"", "bash", "console"}:
                continue
            for line in block.code.replace("\\\n", " ").splitlines():
                command = line.strip().removeprefix("$ ")
                if re.match(r"unirl [a-z]+( |$)", command) and not _PLACEHOLDER.search(
                    command.partition(" #")[0]
                ):
                    yield pytest.param(command, id=f"{page.name}-{command[:60]}")


@pytest.mark.parametrize("command", _commands())
def test_commands_parse(command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    for place, word in enumerate(words):
        if word in {"|", ">", "&&", "&", ";", "2>"}:
            words = words[:place]
            break
    found: Any = typer.main.get_command(app)
    while words and hasattr(found, "commands"):
        assert words[0] in found.commands, f"there is no command {words[0]!r}"
        found, words = found.commands[words[0]], words[1:]
    found.make_context(found.name, list(words))


def test_no_command_stands_in_a_page_that_is_not_looked_at() -> None:
    assert len(list(_commands())) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_a_page_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([".", *paths]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HF_HUB_OFFLINE": "1",
    }
    shell = shutil.which("bash") or "bash"
    for block in _blocks(ROOT / "docs" / name):
        if block.title:
            (tmp_path / block.title).write_text(block.code)
            continue
        starts = {"bash": [shell, "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
        if block.language not in starts:
            continue
        done = subprocess.run(
            [*starts[block.language], block.code],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block.code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_the_error_index_has_every_error() -> None:
    page = (ROOT / "docs" / "errors.md").read_text("utf-8")
    rows = set(re.findall(r"^\| `(\w+)`", page, flags=re.MULTILINE))
    names = {
        name
        for module in ("storage.errors", "datapipe.errors", "unirl.errors")
        for name in importlib.import_module(module).__all__
    }
    assert rows == {*names, "BadFractionError"}
