"""Run a recipe from its files to its summary, or what is left of it."""

from __future__ import annotations

import json
import logging
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from storage import FeatureStore
from unirl.errors import ConfigError
from unirl.policies.adapters import add_adapters, save_adapters
from unirl.policies.checkpoints import load_policy
from unirl.policies.image_tokenizer import ImageTokenizer
from unirl.rewards.train_preference import reward_version
from unirl.rollout.vllm_engine import open_engine
from unirl.trainer.loop import Trainer
from unirl.trainer.plan_policy import require_words
from unirl.trainer.preemption import Interrupted, StopAsked, StopRequest
from unirl.trainer.prepare import prepare_run, require_sources
from unirl.trainer.progress import StepBar, step_bar
from unirl.trainer.prompts import all_prompts, select_prompts
from unirl.trainer.rank_failure import FailureWatch
from unirl.trainer.recipe import Recipe
from unirl.trainer.run_directory import RunDirectory, write_json
from unirl.trainer.run_lock import lock_run
from unirl.trainer.run_record import recipe_defaults, recipe_record
from unirl.trainer.sharding import open_accelerator
from unirl.trainer.stage_checks import check_stages
from unirl.trainer.stages import FIRST_EVALUATION
from unirl.types import Direction, Reward

__all__ = ["run_recipe"]

log = logging.getLogger("unirl.trainer.run")


def run_recipe(
    recipe: Recipe,
    run: Path,
    *,
    assignments: Sequence[str] = (),
    accelerator: Accelerator | None = None,
    write_report: Callable[[Path], Path] | None = None,
) -> dict[str, Any]:
    """Do everything a recipe says that is not done yet; return the summary.

    Args:
        recipe: What to run. `recipe.settings.seed` decides every random number.
        run: The run's directory. If it holds the start of the same run, that is continued.
        assignments: The `path=value` settings that made this recipe out of the named one; noted for a resume.
        accelerator: Says which rank this is; made here if not given.
        write_report: Called on the main rank with the run's directory when the summary is written.

    Raises:
        ConfigError: If the directory holds another run, another process works on it, or the recipe cannot
            work.
        StopAsked: After SIGTERM or SIGUSR1, with the state saved. While something is made that comes before
            the stages, what is finished stays and the rest is made again.
        RankFailedError: On a rank that ended because another one failed.
    """
    accelerator = accelerator or open_accelerator(recipe.settings.distribution)
    with StopRequest(grace_s=recipe.settings.stop_grace_s) as stop, FailureWatch(accelerator):
        try:
            check_stages(recipe.stages, recipe.settings, world_size=accelerator.num_processes)
            with ExitStack() as until_done:
                if accelerator.is_main_process:
                    require_sources(recipe, run)
                    with stop.interruptible():
                        until_done.enter_context(lock_run(run))
                return _run(
                    recipe, run, stop, accelerator, assignments=assignments, write_report=write_report
                )
        except Interrupted:
            raise StopAsked("stopped while preparing, what is finished stays") from None


def _run(
    recipe: Recipe,
    run: Path,
    stop: StopRequest,
    accelerator: Accelerator,
    *,
    assignments: Sequence[str],
    write_report: Callable[[Path], Path] | None,
) -> dict[str, Any]:
    started = time.perf_counter()
    seed = recipe.settings.seed
    directory = RunDirectory(run)
    if accelerator.is_main_process:
        directory.check_same(
            recipe=recipe.name, config=recipe_record(recipe), seed=seed, defaults=recipe_defaults(recipe)
        )
        directory.record(recipe=recipe.name, config=recipe_record(recipe), seed=seed, assignments=assignments)
        with stop.interruptible():
            prepare_run(recipe, run, seed=seed)
        directory.record_store(run / "store", FeatureStore.open(run / "store").snapshot.id)
    accelerator.wait_for_everyone()
    store = FeatureStore.open(run / "store", snapshot=directory.snapshot())
    tokenizer = ImageTokenizer.load(run / "models" / "tokenizer")
    evaluation = select_prompts(store, recipe.evaluation_rows)[: recipe.num_evaluation_prompts]
    directions: list[Direction] = list(dict.fromkeys(d for stage in recipe.stages for d in stage.directions))
    prepared_s = time.perf_counter() - started
    policy = load_policy(run / "models" / "sft")
    prompts = {stage.name: select_prompts(store, stage.prompts) for stage in recipe.stages}
    if recipe.sft.model is not None:
        require_words(recipe, policy.vocabulary, [*prompts.values(), evaluation])
    if recipe.lora_rank:
        add_adapters(policy.lm, rank=recipe.lora_rank, seed=seed)
    reward = recipe.scoring.reward(run / "models" / "reward")
    own = {stage.name: stage.scoring for stage in recipe.stages if stage.scoring is not None}
    if accelerator.is_main_process:
        version = 0 if recipe.reward is None else reward_version(run / "models" / "reward")
        directory.record_reward(version=version, identity=_identity(reward))
    engine = open_engine(
        recipe.settings.rollout,
        policy,
        own_weights=accelerator.is_fsdp2,
        max_probe_gap=recipe.settings.distribution.logprob_gap,
    )
    with _StageBars(show=accelerator.is_main_process) as bars, closing(engine):
        trainer = Trainer(
            directory,
            recipe.stages,
            recipe.settings,
            policy=policy,
            engine=engine,
            tokenizer=tokenizer,
            reward=reward,
            stage_rewards={name: scoring.reward(run / "models" / "reward") for name, scoring in own.items()},
            judge=recipe.data.judge(seed=seed),
            warm_up=select_prompts(store, recipe.warm_up_rows),
            prompts=prompts,
            evaluation_prompts={
                direction: all_prompts(evaluation, direction, image_size=tokenizer.image_size)
                for direction in directions
            },
            accelerator=accelerator,
            on_step=bars.update,
            stop=stop,
        )
        trainer.train()
    is_writer = accelerator.is_main_process
    policy.save(run / "models" / "policy", is_writer=is_writer)
    if recipe.lora_rank:
        save_adapters(policy.lm, run / "models" / "adapters", is_writer=is_writer)
    if is_writer:
        summary = _summary(
            directory, recipe, wall_s={"prepare": prepared_s, "train": trainer.position.wall_s}
        )
        write_json(run / "summary.json", summary)
        if write_report is not None:
            write_report(run)
    accelerator.wait_for_everyone()
    written: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return written


def _identity(reward: Reward) -> str | None:
    """What names a reward's weights and settings; None where a part of it has no name."""
    try:
        return getattr(reward, "identity", None)
    except ConfigError:
        return None


class _StageBars:
    """One bar a stage, opened when its first step is done."""

    def __init__(self, *, show: bool) -> None:
        self._show = show
        self._name: str | None = None
        self._open: Any = None
        self._bar: StepBar | None = None

    def __enter__(self) -> _StageBars:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def update(self, stage: str, done: int, total: int, metrics: Mapping[str, float]) -> None:
        if stage != self._name:
            self._close()
            self._name, self._open = stage, step_bar(f"stage {stage}", total, show=self._show)
            self._bar = self._open.__enter__()
        if self._bar is not None:
            shown = {"reward": "reward/mean", "kl": "kl/reference"}
            self._bar.update(done, {name: metrics[key] for name, key in shown.items() if key in metrics})

    def _close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


def _summary(directory: RunDirectory, recipe: Recipe, *, wall_s: Mapping[str, float]) -> dict[str, Any]:
    """What every stage did to judge and reward, in the direction that it trained."""
    lines = [json.loads(line) for line in (directory.path / "metrics.jsonl").read_text().splitlines()]
    evaluations = {(line["stage"], line["direction"]): line for line in lines if line["kind"] == "eval"}
    before, runs = FIRST_EVALUATION, []
    for stage in recipe.stages:
        steps = [line for line in lines if line["kind"] == "train" and line["stage"] == stage.name]
        runs += [
            {
                "stage": stage.name,
                "direction": direction,
                "seed": recipe.settings.seed,
                "judge_before": evaluations[(before, direction)]["eval/judge"],
                "judge_after": evaluations[(stage.name, direction)]["eval/judge"],
                "reward_before": evaluations[(before, direction)]["eval/reward"],
                "reward_after": evaluations[(stage.name, direction)]["eval/reward"],
                "steps": len(steps),
                "wall_s": round(sum(line["time/step_s"] for line in steps), 2),
            }
            for direction in stage.directions
        ]
        before = stage.name
    return {
        "recipe": recipe.name,
        "reward": directory.read()["reward"],
        "runs": runs,
        "total_wall_s": round(sum(wall_s.values()), 2),
        "prepare_wall_s": round(wall_s["prepare"], 2),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "report": "report.html",
        "store": "store",
    }
