"""The reward recipe from pictures and pairs to served scores, at a tiny size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from recipes.qwen_vl_reward import main
from unirl.errors import ConfigError
from unirl.rewards import Preference, VlmYesNo, load_reward


@pytest.mark.slow
def test_a_reward_is_trained_served_and_asked(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["--tiny", "--out", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["num_scored"] == 8
    assert report["served_gap"] < 1e-5
    assert 0 < report["yes_no_mean"] < 1 and 0 <= report["preference_accuracy"] <= 1
    assert isinstance(load_reward(tmp_path / "yes_no"), VlmYesNo)
    assert isinstance(load_reward(tmp_path / "preference"), Preference)
    before = (tmp_path / "yes_no" / "model.safetensors").stat().st_mtime_ns
    assert CliRunner().invoke(app, ["--tiny", "--out", str(tmp_path)], catch_exceptions=False).exit_code == 0
    assert (tmp_path / "yes_no" / "model.safetensors").stat().st_mtime_ns == before


def test_without_data_it_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name --store and --pairs, or try it with --tiny"):
        main(out=tmp_path)
