"""Scores of folders and stores: the worst first, nothing written where it was not asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from storage import FeatureStore
from unirl.cli import score
from unirl.cli.app import app
from unirl.types import Sample, Scores


class Brightness:
    """A reward that likes bright pictures and cannot score white ones."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def score(self, samples: Sequence[Sample]) -> Scores:
        self.asked += [sample.caption for sample in samples]
        total = np.array([sample.image.mean() / 255 for sample in samples])
        total[total > 0.9] = np.nan
        return Scores(total=total, components={"vlm_mass": np.ones(len(samples))})


@pytest.fixture
def reward(monkeypatch: pytest.MonkeyPatch) -> Brightness:
    made = Brightness()
    monkeypatch.setattr(score, "_reward", lambda *arguments: made)
    return made


@pytest.fixture
def folder(toy: SimpleNamespace, tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, shade in (("dark", 10), ("grey", 100), ("light", 200), ("white", 255)):
        Image.new("RGB", (20, 10), (shade, shade, shade)).save(folder / f"{name}.png")
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return folder


def call(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["score", *map(str, arguments), "--reward", "model"])


def test_a_folder_is_scored_and_the_worst_are_told(reward: Brightness, folder: Path, tmp_path: Path) -> None:
    before = sorted(folder.iterdir())
    out, sheet = tmp_path / "out" / "scores.parquet", tmp_path / "worst.png"
    result = call(folder, "--question", "is it bright ?", "--worst", 2, "--out", out, "--sheet", sheet)
    assert result.exit_code == 0, result.output
    assert "left out: " in result.stderr and "broken.png" in result.stderr
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:3]] == [
        ["0.039", "dark"],
        ["0.392", "grey"],
    ]
    assert "3 pictures scored, mean 0.405, 1 could not be scored" in result.stdout
    assert reward.asked == ["is it bright ?"] * 4
    table = pq.read_table(out)
    assert table["key"].to_pylist() == ["dark", "grey", "light", "white"]
    assert table["score"].to_pylist()[3] is None and table.column_names == [
        "key",
        "score",
        "vlm_mass",
        "caption",
    ]
    assert Image.open(sheet).width == 2 * 168 + 8
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_scores_are_written_as_text(reward: Brightness, folder: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"scores.{suffix}"
    assert call(folder, "--question", "bright ?", "--out", out).exit_code == 0
    lines = out.read_text().splitlines()
    if suffix == "csv":
        assert lines[0] == '"key","score","vlm_mass","caption"' and lines[1].startswith('"dark",0.039')
    else:
        assert [json.loads(line)["key"] for line in lines] == ["dark", "grey", "light", "white"]


def test_a_store_is_asked_with_its_captions(reward: Brightness, toy_store: FeatureStore) -> None:
    result = call(toy_store.path, "--where", "split = 'eval'", "--question", "show {caption} ?", "--json")
    facts = json.loads(result.stdout)
    assert facts["scored"] + facts["not_scored"] == 8 and len(facts["worst"]) == 8
    assert sorted(set(reward.asked)) == sorted({row["caption"] for row in facts["worst"]})
    assert facts["mean"] == pytest.approx(
        np.mean([row["score"] for row in facts["worst"] if row["score"]]), abs=0.05
    )


def test_pictures_without_words_need_a_question_without_them(reward: Brightness, folder: Path) -> None:
    result = call(folder)
    assert result.exit_code == 1
    assert "no picture has a caption to ask about; ask a question without {caption}" in str(result.exception)


def test_a_model_without_a_question_and_one_of_another_kind_are_told(tmp_path: Path, folder: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    runner = CliRunner()
    without = runner.invoke(app, ["score", str(folder), "--reward", str(model)])
    assert "has no question of its own; ask one" in str(without.exception)
    (model / "config.json").write_text('{"model_type": "llama"}')
    other = runner.invoke(app, ["score", str(folder), "--reward", str(model), "--question", "sharp ?"])
    assert "holds a model of type 'llama', wanted a Qwen2.5-VL" in str(other.exception)


def test_the_token_of_a_server_is_that_of_the_file_or_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with the server and with the trainer."""
    given: list[str] = []

    def backend(urls: Sequence[str], *, token: str) -> SimpleNamespace:
        given.append(token)
        return SimpleNamespace()

    monkeypatch.setattr("unirl.rewards.backends.endpoint.EndpointBackend", backend)
    monkeypatch.setenv("UNIRL_REWARD_TOKEN", "of the environment")
    (tmp_path / "token").write_text("of the file\n")
    for file in (None, tmp_path / "token"):
        score._reward(None, ["http://127.0.0.1:1/v1"], file, "is it bright ?", None)
    assert given == ["of the environment", "of the file"]
