"""The command line as a whole: its help, its examples, its weight, and errors of the machine."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from safetensors import SafetensorError
from typer.testing import CliRunner

from unirl.cli import main
from unirl.cli.app import COMMANDS, GROUPS, _expected_errors, _sentence, app

HEAVY = {
    "torch",
    "transformers",
    "accelerate",
    "duckdb",
    "pyarrow",
    "numpy",
    "PIL",
    "storage",
    "datapipe.ingesting",
}
ALL: Mapping[str, Callable[..., None]] = {
    **COMMANDS,
    **{f"{group} {name}": command for group, (_, part) in GROUPS.items() for name, command in part.items()},
}
SERVERS = ("reward serve", "rollout serve")


def test_every_promised_command_is_there() -> None:
    promised = (
        "ingest info query show verify quarantine export compact gc sft train resume eval report score doctor"
    )
    assert set(promised.split()) <= COMMANDS.keys()
    assert {"tokenizer", "reward", "bench"} <= GROUPS.keys()


@pytest.mark.parametrize("name", ALL)
def test_every_command_says_what_it_does_and_shows_an_example(name: str) -> None:
    result = CliRunner().invoke(app, [*name.split(), "--help"])
    assert result.exit_code == 0
    assert re.search(rf"^    (UNIRL_\w+=\S+ )?unirl {name}( |$)", result.output, re.MULTILINE), result.output
    assert result.output.splitlines()[2].strip()[0].isupper()


@pytest.mark.parametrize("name", [name for name in ALL if name not in SERVERS])
def test_every_command_answers_a_program(name: str) -> None:
    assert "--json" in CliRunner().invoke(app, [*name.split(), "--help"]).output


def test_examples_are_on_lines_of_their_own() -> None:
    said = CliRunner().invoke(app, ["query", "--help"]).output
    assert '\n    unirl query data/store "SELECT split, count(*) FROM samples GROUP BY split" --csv\n' in said


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import json, sys\nfrom unirl.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n"
        "    print('LOADED', json.dumps(sorted(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(json.loads(said.partition("LOADED ")[2]))
    assert loaded & HEAVY == set()


def test_the_version_is_told() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.startswith("unirl ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_offered(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    shown = CliRunner().invoke(app, ["--show-completion", shell], prog_name="unirl")
    assert shown.exit_code == 0 and "unirl" in shown.output


def test_an_error_of_the_machine_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "pairs.jsonl").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["tokenizer", "train", str(tmp_path), "--out", str(tmp_path / "file" / "model")])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "Not a directory" in said and len(said.splitlines()) == 1


def test_a_full_disk_is_told_with_what_to_do() -> None:
    full = _sentence(OSError(errno.ENOSPC, "No space left on device", "sheet.png"))
    assert full.startswith("sheet.png: No space left on device; make room")
    model = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert "No space left on device (os error 28); make room" in _sentence(model)
    assert _sentence(SafetensorError("header too large")) == "header too large"
    assert SafetensorError in _expected_errors()
    assert _sentence(OSError(errno.EACCES, "Permission denied", "x")) == "x: Permission denied"
