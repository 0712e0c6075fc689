"""The recipe with a flawed reward: what it pays for. That alarms catch it is PPO-10 and `bench-hacking`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recipes.shapes_hacked import Darkness, shapes_hacked
from unirl.trainer.stage_checks import check_stages
from unirl.types import Sample


def test_darkness_pays_for_dark_pictures_whatever_they_show(tmp_path: Path) -> None:
    samples = [
        Sample(
            key=str(level),
            direction="image",
            caption="a large red circle on the left",
            image=np.full((32, 32, 3), level, np.uint8),
            target="a large red circle on the left",
        )
        for level in (0, 51, 255)
    ]
    scores = Darkness().reward(tmp_path / "no model is read").score(samples)
    np.testing.assert_allclose(scores.total, [0.0, -0.2, -1.0], atol=1e-12)


def test_the_recipe_can_start_and_is_judged_inside_its_stage() -> None:
    recipe = shapes_hacked(seed=2)
    for world_size in (1, 2):
        check_stages(recipe.stages, recipe.settings, world_size=world_size)
    assert recipe.settings.seed == 2 and recipe.reward is None
    assert 0 < recipe.settings.evaluate_every < recipe.stages[0].steps
    assert not recipe.settings.alarms.stop
