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

from recipes.gpu_forms import gpu_settings, tiny_form
from recipes.own_data import HELD_OUT, PICTURED, TRAINED, OwnData
from recipes.picture_scoring import PictureScoring
from recipes.tiny_models import TinyJoint
from unirl.cli import main
from unirl.trainer.recipe import Recipe, SupervisedTraining, TokenizerTraining
from unirl.trainer.stages import Stage

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
        settings=gpu_settings(seed=seed, rollout="vllm", micro_prompts=4, micro_batch_tokens=16384),
    )
    if not tiny:
        return recipe
    return tiny_form(
        recipe,
        models=TinyJoint(),
        tokenizer="tokenizer",
        stage={"steps": 1, "max_words": 8},
        settings={"rollout": "native", "evaluate_every": 0},
        warm_up_rows="split = 'sft'",
        scoring=PictureScoring(vqa="{models}/start/vqa", similarity="{models}/start/similarity"),
    )


if __name__ == "__main__":
    main(["train", "joint_llama_text_then_image", *sys.argv[1:]])
