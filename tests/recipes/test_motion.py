"""The motion recipe at a tiny size, from files to a summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.motion import motion
from storage import FeatureStore
from unirl.config import replace_settings
from unirl.trainer.run import run_recipe

TINY = (
    "data.num_sft=24",
    "data.num_rl=24",
    "data.num_eval=12",
    "tokenizer.steps=8",
    "sft.steps=4",
    "sft.batch_size=16",
    "sft.config.width=64",
    "text.steps=2",
    "text.prompts_per_step=8",
    "settings.evaluate_every=0",
    "settings.micro_prompts=8",
)


@pytest.mark.slow
def test_clips_go_from_files_to_the_reward(tmp_path: Path) -> None:
    run = tmp_path / "run"
    summary = run_recipe(replace_settings(motion(), TINY), run)
    (stage,) = summary["runs"]
    assert (stage["stage"], stage["steps"]) == ("text", 2)
    store = FeatureStore.open(run / "store")
    assert {"frames", "context_codes", "image_codes"} <= set(store.tensor_columns)
    assert store.tensor("frames").shape == (2, 32, 32, 3)
    assert not (run / "models" / "reward").exists()
    trained = [
        line
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if line["kind"] == "train"
    ]
    assert all(0 <= line["reward/mean"] <= 1 for line in trained)
    rows = FeatureStore.open(run / "experience").select("kind = 'train'").column("reward/heading").to_pylist()
    assert set(rows) <= {0.0, 1.0}
