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

from recipes.own_data import CAPTIONED, HELD_OUT, TRAINED, OwnData
from recipes.picture_scoring import PictureScoring
from recipes.shapes import ShapesData
from recipes.tiny_models import TinyJanus
from unirl.cli import main
from unirl.trainer.distribution import Distribution
from unirl.trainer.recipe import Recipe, SupervisedTraining, TokenizerTraining
from unirl.trainer.stages import RunSettings, Stage

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
        settings=RunSettings(
            seed=seed,
            micro_prompts=2,
            micro_batch_tokens=8192,
            logits_chunk=2048,
            checkpoint_every=20,
            evaluate_every=50,
            max_logprob_gap=0.1,
            distribution=Distribution(mixed_precision="bf16", checkpoint_activations=True),
        ),
    )
    return _tiny(recipe) if tiny else recipe


def _tiny(recipe: Recipe) -> Recipe:
    """The same run at a size for two CPU cores and seconds."""
    (stage,) = recipe.stages
    shrunk: dict[str, Any] = {
        "steps": 2,
        "prompts_per_step": 4,
        "group_size": 2,
        "warmup_steps": 1,
        "max_words": 12,
    }
    return replace(
        recipe,
        name="janus_pro_t2i_tiny",
        data=ShapesData(num_sft=8, num_rl=12, num_eval=8),
        evaluation_rows="split = 'eval'",
        tokenizer_rows="split = 'rl'",
        warm_up_rows="split = 'rl'",
        reward_rows="split = 'rl'",
        num_evaluation_prompts=4,
        stages=(replace(stage, prompts="split = 'rl'", **shrunk),),
        models=TinyJanus(),
        tokenizer=TokenizerTraining(model="{models}/start/policy"),
        sft=SupervisedTraining(model="{models}/start/policy"),
        scoring=replace(
            SCORING,
            vqa="{models}/start/vqa",
            similarity="{models}/start/similarity",
            preference="{models}/start/preference",
        ),
        lora_rank=4,
        settings=replace(recipe.settings, distribution=Distribution(), evaluate_every=1, micro_prompts=2),
    )


if __name__ == "__main__":
    main(["train", "janus_pro_t2i", *sys.argv[1:]])
