"""Evaluate the policy of a run again, with the run's own prompts, reward and judge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from accelerate import Accelerator

from storage import FeatureStore
from unirl.config import nearest
from unirl.errors import ConfigError
from unirl.policies.adapters import add_adapters
from unirl.policies.checkpoints import load_policy
from unirl.policies.image_tokenizer import ImageTokenizer
from unirl.policies.policy import Policy
from unirl.rollout.vllm_engine import open_engine
from unirl.trainer.checkpoint import load_policy_weights, newest_checkpoint
from unirl.trainer.evaluate import Evaluation, evaluate_policy, evaluation_sampling
from unirl.trainer.prompts import all_prompts, select_prompts
from unirl.trainer.recipe import Recipe
from unirl.trainer.run_directory import RunDirectory
from unirl.trainer.stage_rewards import StageRewards
from unirl.types import Direction

__all__ = ["evaluate_run"]

CHECKPOINT = re.compile(r"step-(\d+)")
NAMED = ("final", "start", "newest")


def evaluate_run(
    recipe: Recipe,
    run: Path,
    *,
    weights: str = "",
    num_prompts: int | None = None,
    seed: int | None = None,
    accelerator: Accelerator | None = None,
) -> tuple[str, Mapping[Direction, Evaluation]]:
    """Sample once from each evaluation prompt of a run. Nothing is written.

    Args:
        recipe: The run's, with its settings.
        run: The run's directory; its data and models must be prepared.
        weights: "final", "start", "newest" or the step of a checkpoint; "" takes the final policy, or the
            newest checkpoint of a run that has not ended.
        num_prompts: The first so many; the run's own number if None.
        seed: Of the samples; the run's own if None.
        accelerator: Says which rank this is; made here if not given.

    Returns:
        What was evaluated, in words, and the evaluation of each direction that the run trains.

    Raises:
        ConfigError: If the run has no such weights; names those that it has.
    """
    if not (run / "models" / ("sft" if recipe.reward is None else "reward")).is_dir():
        raise ConfigError(f"{run}: its models are not prepared yet; `unirl resume {run}` goes on with it")
    store = FeatureStore.open(run / "store", snapshot=RunDirectory(run).snapshot())
    tokenizer = ImageTokenizer.load(run / "models" / "tokenizer")
    name, policy = _policy(recipe, run, weights)
    seed = recipe.settings.seed if seed is None else seed
    view = select_prompts(store, recipe.evaluation_rows)[: num_prompts or recipe.num_evaluation_prompts]
    accelerator = accelerator or Accelerator()
    rewards = _rewards(recipe, run)
    found: dict[Direction, Evaluation] = {}
    with closing(open_engine(recipe.settings.rollout, policy)) as engine:
        engine.sync(policy, 0)
        for direction in dict.fromkeys(d for stage in recipe.stages for d in stage.directions):
            found[direction] = evaluate_policy(
                accelerator,
                policy,
                tokenizer,
                all_prompts(view, direction, image_size=tokenizer.image_size),
                rewards.of_direction(direction),
                recipe.data.judge(seed=recipe.settings.seed),
                engine=engine,
                sampling=evaluation_sampling(recipe.stages, direction),
                seed=seed,
                max_words=max(stage.max_words for stage in recipe.stages),
            )
    return name, found


def _rewards(recipe: Recipe, run: Path) -> StageRewards:
    model = run / "models" / "reward"
    own = {stage.name: stage.scoring.reward(model) for stage in recipe.stages if stage.scoring is not None}
    return StageRewards(recipe.scoring.reward(model), own, recipe.stages)


def _policy(recipe: Recipe, run: Path, weights: str) -> tuple[str, Policy]:
    """The weights that were asked for, and what they are called."""
    models = run / "models"
    if weights == "":
        weights = "final" if (models / "policy").is_dir() else "newest"
    if weights == "final":
        if not (models / "policy").is_dir():
            raise ConfigError(f"{run}: has not ended, so there is no final policy; --weights newest")
        return "the final policy", load_policy(models / "policy")
    policy = load_policy(models / "sft")
    if weights == "start":
        return "the policy before RL", policy
    path = _checkpoint(run, weights)
    if recipe.lora_rank:
        add_adapters(policy.lm, rank=recipe.lora_rank, seed=recipe.settings.seed)
    policy.take_critic(recipe.settings.critic)
    load_policy_weights(path, model=policy)
    return f"checkpoint {path.name}", policy


def _checkpoint(run: Path, weights: str) -> Path:
    folder = RunDirectory(run).checkpoints
    steps = {
        int(match[1]): path for path in folder.glob("step-*") if (match := CHECKPOINT.fullmatch(path.name))
    }
    if weights == "newest":
        newest = newest_checkpoint(folder)
        if newest is None:
            raise ConfigError(f"{run}: has no checkpoint yet; --weights start evaluates the policy before RL")
        return newest
    if not weights.isdecimal() or int(weights) not in steps:
        known = [*NAMED, *map(str, sorted(steps))]
        raise ConfigError(f"{run}: has no weights {weights!r}{nearest(weights, known)}")
    return steps[int(weights)]
