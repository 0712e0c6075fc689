"""What a run would do, and what stands in its way, before anything is trained.

No GPU is touched and nothing is written: models are counted on torch's meta device, conditions are asked of
the store that there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from storage import FeatureStore, QueryError, StorageError
from unirl.errors import ConfigError
from unirl.policies.policy import Policy
from unirl.policies.token_lm import TokenLM
from unirl.policies.vocabulary import JointVocabulary
from unirl.trainer.clone import HasStore
from unirl.trainer.memory_estimate import ModelShape, estimate_memory, lora_parameters, stage_plan
from unirl.trainer.prepare import require_sources
from unirl.trainer.recipe import Recipe
from unirl.trainer.run_directory import RunDirectory
from unirl.trainer.run_record import recipe_record
from unirl.trainer.stage_checks import check_stages
from unirl.trainer.stages import Stage

__all__ = ["PARTS", "RunPlan", "StagePlan", "plan_run"]

PARTS = ("store", "models/tokenizer", "models/sft", "models/reward")
"""What a run prepares before RL, in order, under its directory; the last only with a reward model."""
SPECIALS_AROUND_PICTURE = 2
SHOWN_WORDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage, with what follows from its settings."""

    name: str
    direction: str
    algorithm: str
    steps: int
    condition: str
    num_prompts: int | None
    """Rows that the condition selects; None before there is a store."""
    prompts_per_step: int
    group_size: int
    samples_per_step: int
    micro_batches: int
    """Forward passes of a rank in one pass over a rollout."""
    optimizer_steps: int
    """Over the whole stage."""
    max_response_tokens: int
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A recipe, resolved."""

    recipe: str
    run: str
    seed: int
    world_size: int
    store: str | None
    """Where the rows were counted; None if the recipe makes its data when it starts."""
    num_rows: int | None
    rows: Mapping[str, int]
    """Rows of each condition that trains or evaluates, by the setting's name."""
    stages: tuple[StagePlan, ...]
    prepared: Mapping[str, bool]
    """Which of the parts before RL are finished in the run's directory."""
    vocabulary: Mapping[str, int]
    """Text ids, image codes, codes of a picture, positions."""
    parameters: Mapping[str, int]
    """By model."""
    memory_bytes: Mapping[str, int]
    """Of one rank in the stage that takes most, as `MemoryEstimate.parts` names them. Python, torch and
    transformers take about half a GiB beside it."""
    problems: tuple[str, ...]
    """Why it cannot start; empty when it can."""
    notes: tuple[str, ...]
    """What it can start with, and should be known."""


def plan_run(recipe: Recipe, run: Path, *, world_size: int = 1) -> RunPlan:
    """Resolve a recipe and look for everything that would stop it.

    Args:
        recipe: With all its settings.
        run: The run's directory, which may be there already.
        world_size: Number of ranks that it would run on.
    """
    problems: list[str] = []
    notes: list[str] = []
    _check_directory(recipe, run, problems)
    try:
        require_sources(recipe)
    except (ConfigError, StorageError) as error:
        problems.extend(str(error).splitlines())
    store = _open_store(recipe, run, problems)
    rows = {} if store is None else _count_rows(recipe, store, problems)
    counts = {
        stage.name: rows[f"{stage.name}.prompts"]
        for stage in recipe.stages
        if f"{stage.name}.prompts" in rows
    }
    has_all = len(counts) == len({stage.name for stage in recipe.stages})
    try:
        check_stages(
            recipe.stages, recipe.settings, world_size=world_size, num_prompts=counts if has_all else None
        )
    except ConfigError as error:
        problems.extend(line.strip() for line in str(error).splitlines()[1:])
    policy = _empty_policy(recipe, problems)
    if policy is not None:
        _check_captions(recipe, policy, store, problems, notes)
    num_evaluated = min(
        rows.get("evaluation_rows", recipe.num_evaluation_prompts), recipe.num_evaluation_prompts
    )
    if num_evaluated < world_size:
        problems.append(
            f"evaluation_rows: {num_evaluated} prompts for {world_size} ranks; give each one or more"
        )
    return RunPlan(
        recipe=recipe.name,
        run=str(run),
        seed=recipe.settings.seed,
        world_size=world_size,
        store=None if store is None else store.url,
        num_rows=None if store is None else len(store),
        rows=rows,
        stages=tuple(_stage_plan(stage, recipe, policy, counts, world_size) for stage in recipe.stages),
        prepared={part: (run / part).is_dir() for part in PARTS[: 3 if recipe.reward is None else 4]},
        vocabulary={} if policy is None else _vocabulary_sizes(recipe, policy),
        parameters={} if policy is None else _parameters(policy),
        memory_bytes={} if policy is None else _memory(recipe, policy, store, world_size),
        problems=tuple(dict.fromkeys(problems)),
        notes=tuple(notes),
    )


def _check_directory(recipe: Recipe, run: Path, problems: list[str]) -> None:
    try:
        RunDirectory(run).check_same(
            recipe=recipe.name, config=recipe_record(recipe), seed=recipe.settings.seed
        )
    except ConfigError as error:
        problems.append(str(error))


def _open_store(recipe: Recipe, run: Path, problems: list[str]) -> FeatureStore | None:
    """The run's own store if it is made, else the one that the recipe's data names."""
    path = run / "store"
    try:
        if not path.is_dir():
            if not isinstance(recipe.data, HasStore):
                return None
            path = recipe.data.store_path()
        return FeatureStore.open(path)
    except (StorageError, ConfigError) as error:
        problems.append(str(error))
        return None


def _conditions(recipe: Recipe) -> dict[str, str]:
    named = ["tokenizer_rows", "warm_up_rows", "reward_rows", "evaluation_rows"]
    if recipe.reward is None:
        named.remove("reward_rows")
    return {
        **{name: getattr(recipe, name) for name in named},
        **{f"{stage.name}.prompts": stage.prompts for stage in recipe.stages},
    }


def _count_rows(recipe: Recipe, store: FeatureStore, problems: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    conditions = _conditions(recipe)
    for name, condition in conditions.items():
        try:
            counts[name] = len(store.select(condition))
        except QueryError as error:
            problems.append(f"{name}: {error}")
            continue
        if not counts[name]:
            problems.append(f"{name}: no row of {store.url} where {condition}")
    trained = " OR ".join(f"({conditions[name]})" for name in counts if name != "evaluation_rows")
    if trained and "evaluation_rows" in counts:
        shared = len(store.select(f"({recipe.evaluation_rows}) AND ({trained})"))
        if shared:
            problems.append(
                f"evaluation_rows: {shared} of its rows are also trained on; hold them out of the others"
            )
    return counts


def _empty_policy(recipe: Recipe, problems: list[str]) -> Policy | None:
    """The policy without weights, on the meta device."""
    config = recipe.tokenizer.config
    try:
        vocabulary = JointVocabulary.from_captions(
            recipe.data.captions(),
            num_codes=config.num_codes,
            rows=config.grid_size,
            columns=config.grid_size,
        )
        with torch.device("meta"):
            return TokenLM.create(recipe.sft.config, vocabulary, seed=0)
    except (ConfigError, StorageError) as error:
        problems.append(str(error))
    except ValueError as error:  # transformers refuses sizes that do not go together
        problems.append(f"sft.config: {error}")
    return None


def _check_captions(
    recipe: Recipe, policy: Policy, store: FeatureStore | None, problems: list[str], notes: list[str]
) -> None:
    """Whether pictures, prompts and answers fit the model's positions, and the words its vocabulary."""
    vocabulary, positions = policy.vocabulary, recipe.sft.config.max_length
    captions = _captions(recipe, store)
    longest = max(captions, key=lambda text: len(vocabulary.words(text)), default="")
    num_words = len(vocabulary.words(longest))
    picture = vocabulary.grid.response_length + SPECIALS_AROUND_PICTURE
    shown = picture * _num_pictures(recipe)
    for stage in recipe.stages:
        needed = max(
            1 + (picture + num_words if direction == "image" else shown + stage.max_words + 1)
            for direction in stage.directions
        )
        if needed > positions:
            problems.append(
                f"stage {stage.name}: prompt and response take {needed} positions, the policy has "
                f"{positions}; raise sft.config.max_length to {needed} or more, or leave long captions out"
            )
    if 1 + shown + num_words + 1 > positions:
        problems.append(
            f"the longest caption has {num_words} words, with its picture {shown + num_words + 2} "
            f"positions, the policy has {positions}: {longest[:60]!r}; raise sft.config.max_length or leave "
            "it out"
        )
    unknown = vocabulary.tokenizer.unk_token_id
    lacking = [text for text in captions if unknown in vocabulary.words(text)]
    if lacking:
        problems.append(
            f"{len(lacking)} captions have words that the vocabulary lacks, first {lacking[0][:60]!r}; "
            "the recipe's captions() must hold every word"
        )
    for stage in recipe.stages:
        if "text" in stage.directions and num_words > stage.max_words:
            notes.append(
                f"stage {stage.name}: the longest caption has {num_words} words, answers are cut at "
                f"max_words {stage.max_words}"
            )


def _captions(recipe: Recipe, store: FeatureStore | None) -> Sequence[str]:
    """Those of the store, or what the recipe may write into one."""
    if store is None or "caption" not in store.columns:
        return recipe.data.captions()
    captions: list[str] = store.select("caption <> ''").column("caption").to_pylist()
    return captions


def _num_pictures(recipe: Recipe) -> int:
    """Pictures that a prompt to be answered with text shows: one, or the frames of its clip."""
    return 1 if recipe.clip is None else recipe.clip.num_frames


def _memory(recipe: Recipe, policy: Policy, store: FeatureStore | None, world_size: int) -> Mapping[str, int]:
    """The estimate of the stage that takes most."""
    vocabulary, config = policy.vocabulary, recipe.sft.config
    shape = ModelShape.of(
        config.llama(vocabulary), num_parameters=sum(p.numel() for p in policy.lm.parameters())
    )
    longest = max((len(vocabulary.words(text)) for text in _captions(recipe, store)), default=0)
    shown = (vocabulary.grid.response_length + SPECIALS_AROUND_PICTURE) * _num_pictures(recipe)
    estimates = [
        estimate_memory(
            shape,
            stage_plan(
                stage,
                recipe.settings,
                prompt_length=1 + (longest + 1 if direction == "image" else shown),
                ranks=world_size if recipe.settings.distribution.sharding == "fsdp2" else 1,
                response_length=policy.max_response_length(direction, stage.max_words),
                trained_parameters=lora_parameters(shape, recipe.lora_rank) if recipe.lora_rank else None,
            ),
        )
        for stage in recipe.stages
        for direction in stage.directions
    ]
    return max(estimates, key=lambda estimate: estimate.peak).parts() if estimates else {}


def _stage_plan(
    stage: Stage, recipe: Recipe, policy: Policy | None, counts: Mapping[str, int], world_size: int
) -> StagePlan:
    per_rank = -(-stage.prompts_per_step // world_size)
    return StagePlan(
        name=stage.name,
        direction=stage.direction,
        algorithm=stage.algorithm,
        steps=stage.steps,
        condition=stage.prompts,
        num_prompts=counts.get(stage.name),
        prompts_per_step=stage.prompts_per_step,
        group_size=stage.group_size,
        samples_per_step=stage.samples_per_step,
        micro_batches=-(-per_rank // max(1, recipe.settings.micro_prompts)),
        optimizer_steps=stage.steps * stage.epochs * stage.updates_per_step,
        max_response_tokens=stage.max_words + 1
        if policy is None
        else max(policy.max_response_length(d, stage.max_words) for d in stage.directions),
        learning_rate=stage.learning_rate,
    )


def _vocabulary_sizes(recipe: Recipe, policy: Policy) -> dict[str, int]:
    grid = policy.vocabulary.grid
    return {
        "text_ids": grid.offset,
        "image_codes": grid.num_codes,
        "codes_per_picture": grid.length,
        "positions": recipe.sft.config.max_length,
    }


def _parameters(policy: Any) -> dict[str, int]:
    return {
        "policy": sum(p.numel() for p in policy.lm.parameters()),
        "critic": sum(p.numel() for p in policy.critic.parameters()),
    }
