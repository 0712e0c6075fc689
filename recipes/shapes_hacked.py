"""A flawed reward on purpose: it pays for dark pictures, whatever they show, and the alarms must say so.

    python -m recipes.shapes_hacked --run runs/shapes_hacked

Image tokenizer and policy are trained for longer than in `shapes`, until a good part of the pictures is
right, so that there is something to lose. Then one image stage is paid for darkness alone, and judged at
every third step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.shapes import ShapesData, shapes
from unirl.cli import main
from unirl.rewards import Ensemble, PictureStatistic
from unirl.trainer.recipe import Recipe
from unirl.trainer.stages import Stage
from unirl.types import Reward

__all__ = ["Darkness", "shapes_hacked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Darkness:
    """Minus the mean brightness of the picture, from -1 (white) to 0 (black). No model is asked."""

    def reward(self, model: Path) -> Reward:
        """Return the flawed reward."""
        return Ensemble({"brightness": (PictureStatistic("brightness"), -1.0)})


def shapes_hacked(*, seed: int = 0) -> Recipe:
    """Return the run: an image stage on the flawed reward, with nothing that holds the policy back."""
    healthy = shapes(seed=seed)
    stage = Stage(
        name="image",
        direction="image",
        prompts="split = 'rl'",
        steps=24,
        algorithm="grpo",
        learning_rate=4e-4,
        warmup_steps=3,
        kl_coef=0.0,
        kl_target=None,
        max_words=8,
    )
    return replace(
        healthy,
        name="shapes_hacked",
        data=ShapesData(num_eval=240),
        evaluation_rows="split = 'eval' AND NOT held_out",
        num_evaluation_prompts=120,
        stages=(stage,),
        tokenizer=replace(healthy.tokenizer, steps=300),
        sft=replace(healthy.sft, steps=250),
        reward=None,
        scoring=Darkness(),
        settings=replace(healthy.settings, evaluate_every=3),
    )


if __name__ == "__main__":
    main(["train", "shapes_hacked", *sys.argv[1:]])
