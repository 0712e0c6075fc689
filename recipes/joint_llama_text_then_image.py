"""A language model with image codes in its vocabulary: first it learns to describe, then to draw.

    unirl join models/llama-3.2-1b models/vq --out models/joint
    unirl ingest pictures/ data/store
    unirl train joint_llama_text_then_image --store data/store --rollout http://10.0.0.2:8300
    unirl train joint_llama_text_then_image --tiny

The policy must have learnt its codes before, as a public model of this kind has; `unirl join` alone gives a
model that knows none. vLLM serves it natively, here or on a second machine.

Needs, for 1B, one GPU of 80 GB for the policy, one for the engine and one for the rewards. Expected, by
arithmetic: a minute a text step and three a picture step, half a day for both stages. It was not run at this
size. Tests run `--tiny` on a CPU: random weights of the same classes.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from recipes.own_data import HELD_OUT, PICTURED, TRAINED, OwnData
from recipes.picture_scoring import PictureScoring
from recipes.shapes import ShapesData
from recipes.tiny_models import TinyJoint
from unirl.cli import main
from unirl.trainer.distribution import Distribution
from unirl.trainer.recipe import Recipe, SupervisedTraining, TokenizerTraining
from unirl.trainer.stages import RunSettings, Stage

__all__ = ["joint_llama_text_then_image"]

ROWS = f"{PICTURED} AND {TRAINED}"


def joint_llama_text_then_image(*, seed: int = 0, tiny: bool = False) -> Recipe:
    """Return the complete run; `tiny` is the same one on random weights and 24 made pictures."""
    recipe = Recipe(
        name="joint_llama_text_then_image",
        data=OwnData(),
        tokenizer_rows=ROWS,
        warm_up_rows=ROWS,
        reward_rows=ROWS,
        evaluation_rows=f"{PICTURED} AND {HELD_OUT}",
        num_evaluation_prompts=256,
        stages=(
            Stage(
                name="text",
                direction="text",
                prompts=ROWS,
                steps=200,
                prompts_per_step=64,
                group_size=8,
                max_words=64,
                algorithm="ppo",
                learning_rate=1e-6,
                critic_learning_rate=1e-5,
                warmup_steps=20,
                lam=1.0,
                kl_coef=0.02,
                overlong_buffer=16,
                importance="token",
                replay_prompts=16,
            ),
            Stage(
                name="image",
                direction="image",
                prompts=ROWS,
                steps=200,
                prompts_per_step=64,
                group_size=8,
                max_words=64,
                algorithm="ppo",
                guidance=3.0,
                guidance_mode="detach_uncond",
                learning_rate=1e-6,
                critic_learning_rate=1e-5,
                warmup_steps=20,
                kl_coef=0.01,
                importance="token",
                replay_prompts=16,
            ),
        ),
        tokenizer=TokenizerTraining(model="models/vq"),
        sft=SupervisedTraining(model="models/joint"),
        reward=None,
        scoring=PictureScoring(),
        settings=RunSettings(
            seed=seed,
            rollout="vllm",
            micro_prompts=4,
            micro_batch_tokens=16384,
            logits_chunk=2048,
            checkpoint_every=20,
            evaluate_every=50,
            max_logprob_gap=0.1,
            distribution=Distribution(mixed_precision="bf16", checkpoint_activations=True),
        ),
    )
    return _tiny(recipe) if tiny else recipe


def _tiny(recipe: Recipe) -> Recipe:
    """The same run at a size for two CPU cores and seconds, sampled from by the native engine."""
    shrunk: dict[str, Any] = {
        "steps": 1,
        "prompts": "split = 'rl'",
        "prompts_per_step": 4,
        "group_size": 2,
        "warmup_steps": 1,
        "max_words": 8,
        "replay_prompts": 2,
    }
    settings = replace(
        recipe.settings, rollout="native", micro_prompts=4, evaluate_every=0, distribution=Distribution()
    )
    stages = tuple(
        replace(stage, overlong_buffer=min(stage.overlong_buffer, 2), **shrunk) for stage in recipe.stages
    )
    return replace(
        recipe,
        name="joint_llama_text_then_image_tiny",
        data=ShapesData(num_sft=8, num_rl=12, num_eval=8),
        evaluation_rows="split = 'eval'",
        tokenizer_rows="split = 'rl'",
        warm_up_rows="split = 'sft'",
        reward_rows="split = 'rl'",
        num_evaluation_prompts=4,
        stages=stages,
        models=TinyJoint(),
        tokenizer=TokenizerTraining(model="{models}/start/tokenizer"),
        sft=SupervisedTraining(model="{models}/start/policy"),
        scoring=PictureScoring(vqa="{models}/start/vqa", similarity="{models}/start/similarity"),
        settings=settings,
    )


if __name__ == "__main__":
    main(["train", "joint_llama_text_then_image", *sys.argv[1:]])
