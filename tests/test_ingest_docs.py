"""The page about ingest: its commands parse, its sources open, its reasons exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import typer.main

from datapipe.sources.conversation import Medium, read_messages
from datapipe.sources.opener import FORMATS
from unirl.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "ingest.md").read_text("utf-8")
COMMANDS = sorted(set(re.findall(r"`(unirl (?:ingest|quarantine) [^`]+)`", PAGE)))
SOURCE = "".join(path.read_text("utf-8") for path in (ROOT / "datapipe").rglob("*.py"))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str) -> None:
    words = shlex.split(command)[1:]
    group = typer.main.get_command(app)
    found = group.commands[words[0]]  # type: ignore[attr-defined]
    found.make_context(words[0], words[1:], resilient_parsing=False)


def test_every_kind_of_source_has_a_command() -> None:
    table = PAGE.split("## Sources")[1].split("### ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(rows) >= 15 and all("`unirl ingest " in row for row in rows)
    assert f"`--format {'|'.join(FORMATS)}`" in PAGE


def test_reasons_are_those_of_the_code() -> None:
    table = PAGE.split("## What is bad")[1].split("**Budget.**")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    codes = {code for cell in cells for code in re.findall(r"`([a-z_]+)`", cell)}
    made = {
        "caption_missing",
        "caption_none",
        "caption_nan",
        "caption_empty",
        "caption_number",
        "caption_bool",
    }
    made |= {"caption_list", "caption_dict", "message_empty", "image_count", "video_count"}
    assert {code for code in codes - made if f'"{code}"' not in SOURCE} == set()


def test_the_example_of_a_conversation_is_in_the_form() -> None:
    example = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    messages = json.loads(example.group(1))

    assert read_messages(messages, [Medium(kind="image", value=b"x")])[0] == messages
