"""Janus-Pro draws from prompts, and learns from a yes/no question, HPS and preferences.

    unirl ingest prompts.txt data/prompts
    unirl train janus_pro_t2i --store data/prompts --set scoring.endpoints=http://10.0.0.3:8011/v1
    unirl train janus_pro_t2i --tiny

Needs, for the 1B model with LoRA, one GPU of 80 GB for policy and rollout, and a second one that serves the
question's model (Qwen2.5-VL-7B). Expected, by arithmetic: 3 to 6 minutes a step, about a day for 300 steps.
It was not run at this size. Tests run `--tiny` on a CPU: random weights of the same classes.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from recipes.gpu_forms import gpu_settings, tiny_form
from recipes.own_data import CAPTIONED, HELD_OUT, TRAINED, OwnData
from recipes.picture_scoring import PictureScoring
from recipes.tiny_models import TinyJanus
from unirl.cli import main
from unirl.trainer.recipe import Recipe, SupervisedTraining, TokenizerTraining
from unirl.trainer.stages import Stage

__all__ = ["janus_pro_t2i"]

MODEL = "models/janus-pro-1b"
"""Folder of a Janus-Pro in the form of transformers, with `image_grid.json` beside it."""
SCORING = PictureScoring(disagreement_penalty=0.1)


def janus_pro_t2i(*, seed: int = 0, tiny: bool = False) -> Recipe:
    """Return the complete run; `tiny` is the same one on random weights and 24 made pictures."""
    recipe = Recipe(
        name="janus_pro_t2i",
        data=OwnData(),
        tokenizer_rows=f"{CAPTIONED} AND {TRAINED}",
        warm_up_rows=f"{CAPTIONED} AND {TRAINED}",
        reward_rows=f"{CAPTIONED} AND {TRAINED}",
        evaluation_rows=f"{CAPTIONED} AND {HELD_OUT}",
        num_evaluation_prompts=256,
        stages=(
            Stage(
                name="image",
                direction="image",
                prompts=f"{CAPTIONED} AND {TRAINED}",
                steps=300,
                prompts_per_step=64,
                group_size=8,
                max_words=64,
                algorithm="grpo",
                guidance=5.0,
                guidance_mode="detach_uncond",
                learning_rate=2e-5,
                warmup_steps=20,
                updates_per_step=2,
                clip_low=0.2,
                clip_high=0.28,
                kl_coef=0.01,
                kl_target=None,
                max_grad_norm=1.0,
                importance="token",
            ),
        ),
        tokenizer=TokenizerTraining(model=MODEL),
        sft=SupervisedTraining(model=MODEL),
        reward=None,
        scoring=SCORING,
        lora_rank=32,
        settings=gpu_settings(seed=seed),
    )
    if not tiny:
        return recipe
    rewards: dict[str, Any] = {
        name: f"{{models}}/start/{name}" for name in ("vqa", "similarity", "preference")
    }
    return tiny_form(
        recipe,
        models=TinyJanus(),
        stage={"max_words": 12},
        settings={"evaluate_every": 1},
        scoring=replace(SCORING, **rewards),
    )


if __name__ == "__main__":
    main(["train", "janus_pro_t2i", *sys.argv[1:]])
