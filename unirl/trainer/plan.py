"""What a run would do, and what stands in its way, before anything is trained.

No GPU is touched and nothing is written: models are counted on torch's meta device, conditions are asked of
the store that there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from storage import FeatureStore, QueryError, StorageError
from unirl.errors import ConfigError
from unirl.trainer.clone import HasStore
from unirl.trainer.plan_policy import PolicySizes, caption_problems, memory_parts, policy_sizes
from unirl.trainer.prepare import require_sources
from unirl.trainer.recipe import Recipe
from unirl.trainer.run_directory import RunDirectory
from unirl.trainer.run_record import recipe_defaults, recipe_record
from unirl.trainer.stage_checks import check_stages
from unirl.trainer.stages import Stage

__all__ = ["PARTS", "RunPlan", "StagePlan", "plan_run"]

PARTS = ("store", "models/tokenizer", "models/sft", "models/reward")
"""What a run prepares before RL, in order, under its directory; the last only with a reward model."""


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
        require_sources(recipe, run)
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
    sizes = policy_sizes(recipe, run, problems, notes)
    captions = [] if sizes is None else _captions(recipe, store)
    if sizes is not None:
        wrong, cut = caption_problems(recipe, sizes, captions)
        problems += wrong
        notes += cut
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
        stages=tuple(_stage_plan(stage, recipe, sizes, counts, world_size) for stage in recipe.stages),
        prepared={part: (run / part).is_dir() for part in PARTS[: 3 if recipe.reward is None else 4]},
        vocabulary={} if sizes is None else _vocabulary_sizes(sizes),
        parameters={} if sizes is None else sizes.parameters,
        memory_bytes={} if sizes is None else memory_parts(recipe, sizes, captions, world_size=world_size),
        problems=tuple(dict.fromkeys(problems)),
        notes=tuple(notes),
    )


def _check_directory(recipe: Recipe, run: Path, problems: list[str]) -> None:
    try:
        RunDirectory(run).check_same(
            recipe=recipe.name,
            config=recipe_record(recipe),
            seed=recipe.settings.seed,
            defaults=recipe_defaults(recipe),
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


def _captions(recipe: Recipe, store: FeatureStore | None) -> Sequence[str]:
    """Those of the rows that the recipe uses, or what it may write into a store."""
    if store is None or "caption" not in store.columns:
        return recipe.data.captions()
    conditions = _conditions(recipe)
    del conditions["tokenizer_rows"]  # which learns from pictures alone
    used = " OR ".join(f"({condition})" for condition in conditions.values())
    try:
        view = store.select(f"caption <> '' AND ({used})")
    except QueryError:  # which condition it is stands among the problems
        view = store.select("caption <> ''")
    captions: list[str] = view.column("caption").to_pylist()
    return captions


def _stage_plan(
    stage: Stage, recipe: Recipe, sizes: PolicySizes | None, counts: Mapping[str, int], world_size: int
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
        if sizes is None
        else max(sizes.response_length(d, stage.max_words) for d in stage.directions),
        learning_rate=stage.learning_rate,
    )


def _vocabulary_sizes(sizes: PolicySizes) -> dict[str, int]:
    grid = sizes.vocabulary.grid
    return {
        "text_ids": grid.offset,
        "image_codes": grid.num_codes,
        "codes_per_picture": grid.length,
        "positions": sizes.positions,
    }
