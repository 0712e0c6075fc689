"""Pictures in the terminal, as letters elsewhere, and on contact sheets."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner, Result

from storage import FeatureStore
from unirl.cli import show as show_command
from unirl.cli.contact_sheet import draw_sheet
from unirl.cli.data import data_app
from unirl.cli.half_blocks import as_half_blocks, as_letters, fitted_size

RED, BLUE = (200, 0, 0), (0, 0, 200)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(data_app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("height", "width", "columns", "lines", "size"),
    [
        (32, 32, 100, 40, (64, 64)),  # twice, not 2.5 times
        (100, 200, 100, 40, (50, 100)),
        (400, 100, 100, 40, (80, 20)),
        (3, 1000, 80, 20, (2, 80)),
        (1, 1, 80, 20, (40, 40)),
    ],
)
def test_a_picture_fits_the_terminal(
    height: int, width: int, columns: int, lines: int, size: tuple[int, int]
) -> None:
    assert fitted_size(height, width, columns=columns, lines=lines) == size


def test_two_rows_of_pixels_are_a_line_of_half_blocks() -> None:
    pixels = np.array([[RED, BLUE], [BLUE, RED]], np.uint8)
    console = Console(color_system="truecolor", force_terminal=True, width=20)
    with console.capture() as captured:
        console.print(as_half_blocks(pixels), end="")
    shown = captured.get()
    assert shown.count("▀") == 2
    assert "38;2;200;0;0;48;2;0;0;200m▀" in shown and "38;2;0;0;200;48;2;200;0;0m▀" in shown


def test_letters_are_denser_where_it_is_brighter() -> None:
    pixels = np.zeros((2, 3, 3), np.uint8)
    pixels[:, 1], pixels[:, 2] = 128, 255
    assert as_letters(pixels) == " +@"


def test_a_key_is_drawn_and_described(toy_store: FeatureStore) -> None:
    result = call("show", toy_store.path, "toy/03")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()[-40:]
    facts, drawn = result.output[: -len("\n".join(lines)) - 1], "\n".join(lines)
    assert "toy/03" not in drawn and {len(line) for line in lines} == {80}, "8 x 8 pixels, ten times"
    assert "toy/03" in facts and "black and white" in facts and "▀" not in drawn
    described = json.loads(call("show", toy_store.path, "toy/03", "--json").output)
    assert described["caption"] == "black and white" and described["row"] == 3


def test_a_row_without_a_picture_is_described(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path / "store")
    with store.writer(message="prompts") as writer:
        writer.add("p/1", caption="a cat", modality="text")
    result = call("show", tmp_path / "store", "p/1")
    assert result.exit_code == 0 and "a cat" in result.output and "@" not in result.output


def test_a_sheet_of_a_query(toy_store: FeatureStore, tmp_path: Path) -> None:
    path = tmp_path / "new" / "sheet.png"
    options = ["--where", "split = 'eval'", "--order-by", "key DESC", "--columns", 3, "--side", 32]
    result = call("show", toy_store.path, "--sheet", path, *options)
    assert result.exit_code == 0 and f"{path}: 8 rows" in result.output.replace("\n", "")
    sheet = Image.open(path)
    assert sheet.size == (3 * 40 + 8, 3 * 68 + 8)
    keys = json.loads(call("show", toy_store.path, "--sheet", path, *options, "--json").output)["keys"]
    assert keys == [f"toy/{number:02d}" for number in range(28, -1, -4)]


def test_a_damaged_picture_leaves_a_grey_square(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path / "store")
    with store.writer(message="bad") as writer:
        writer.add("bad", blob=b"\x89PNG\r\n\x1a\n", caption="cut off")
    result = call("show", tmp_path / "store", "--sheet", tmp_path / "sheet.png")
    assert result.exit_code == 0 and result.stderr.startswith("bad: ")
    assert Image.open(tmp_path / "sheet.png").getpixel((30, 30)) == (225, 225, 225)


def test_tiles_stand_in_rows_and_words_are_cut() -> None:
    tall, wide = np.full((8, 4, 3), RED, np.uint8), np.full((100, 200, 3), BLUE, np.uint8)
    sheet = draw_sheet([tall, wide, None], ["one", "many words " * 20, "x" * 200], columns=2, side=40)
    assert sheet.size == (2 * 48 + 8, 2 * 76 + 8)
    assert sheet.getpixel((28, 20)) == RED and sheet.getpixel((10, 20)) == (250, 250, 250)
    assert sheet.getpixel((70, 28)) == BLUE


def test_a_terminal_without_colours_gets_letters(
    toy_store: FeatureStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = partial(Console, force_terminal=True, color_system="truecolor", no_color=True)
    monkeypatch.setattr(show_command, "Console", plain)
    show_command._draw(np.full((8, 8, 3), 255, np.uint8))
    said = capsys.readouterr().out
    assert "▀" not in said and "@@@@@@@@" in said
