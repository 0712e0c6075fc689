"""What recipes for GPUs share: how they run, and the tiny form in which a CPU executes every line of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from recipes.shapes import ShapesData
from unirl.trainer.distribution import Distribution
from unirl.trainer.recipe import Models, Recipe, SupervisedTraining, TokenizerTraining
from unirl.trainer.stages import RunSettings

__all__ = ["gpu_settings", "tiny_form"]

ROWS = "split = 'rl'"


def gpu_settings(*, seed: int, **changes: Any) -> RunSettings:
    """Return bf16, activations computed again and logits in chunks; `changes` are further settings."""
    settings: dict[str, Any] = {
        "micro_prompts": 2,
        "micro_batch_tokens": 8192,
        "logits_chunk": 2048,
        "checkpoint_every": 20,
        "evaluate_every": 50,
        "max_logprob_gap": 0.1,
        "distribution": Distribution(mixed_precision="bf16", checkpoint_activations=True),
    }
    return RunSettings(seed=seed, **settings | changes)


def tiny_form(
    recipe: Recipe,
    *,
    models: Models,
    tokenizer: str = "policy",
    stage: Mapping[str, Any],
    settings: Mapping[str, Any],
    **changes: Any,
) -> Recipe:
    """Return the same run on random weights and 28 made pictures, for two CPU cores and seconds.

    Args:
        recipe: The whole form.
        models: Writes the weights when the run starts.
        tokenizer: Which of them has the image tokenizer.
        stage: Fields of every stage, such as its `max_words`.
        settings: Fields of the run's settings.
        changes: Other fields of the recipe.
    """
    small: dict[str, Any] = {
        "prompts": ROWS,
        "prompts_per_step": 4,
        "group_size": 2,
        "warmup_steps": 1,
        "steps": 2,
    }
    parts: dict[str, Any] = {
        "name": f"{recipe.name}_tiny",
        "data": ShapesData(num_sft=8, num_rl=12, num_eval=8),
        "tokenizer_rows": ROWS,
        "warm_up_rows": ROWS,
        "reward_rows": ROWS,
        "evaluation_rows": "split = 'eval'",
        "num_evaluation_prompts": 4,
        "stages": tuple(
            replace(
                one,
                overlong_buffer=min(one.overlong_buffer, 1),
                replay_prompts=min(one.replay_prompts, 2),
                **small | dict(stage),
            )
            for one in recipe.stages
        ),
        "models": models,
        "tokenizer": TokenizerTraining(model=f"{{models}}/start/{tokenizer}"),
        "sft": SupervisedTraining(model="{models}/start/policy"),
        "lora_rank": min(recipe.lora_rank, 4),
        "settings": replace(recipe.settings, distribution=Distribution(), **settings),
    }
    return replace(recipe, **parts | changes)
