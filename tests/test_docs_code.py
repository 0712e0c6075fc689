"""The code in the pages: commands parse, imports exist, every error has its row. test_docs_run.py runs it."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main

from unirl.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "docs_blocks.py")))
OURS = ("storage", "datapipe", "unirl", "recipes")
_PLACEHOLDER = re.compile(r"\.\.\.|\{|\$|<|\[")


def _all(language: str) -> Iterator[Any]:
    for page in BLOCKS.PAGES:
        for number, block in enumerate(BLOCKS.blocks(page)):
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
    for page in BLOCKS.PAGES:
        for block in BLOCKS.blocks(page):
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


def test_the_error_index_has_every_error() -> None:
    page = (ROOT / "docs" / "errors.md").read_text("utf-8")
    rows = set(re.findall(r"^\| `(\w+)`", page, flags=re.MULTILINE))
    names = {
        name
        for module in ("storage.errors", "datapipe.errors", "unirl.errors")
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == module
    }
    assert rows == {*names, "BadFractionError"}
