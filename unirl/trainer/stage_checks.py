"""Everything that can be wrong with a run before it starts, in one error."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import get_args

from unirl.algorithms import KL_ESTIMATORS, sampling_errors
from unirl.algorithms.schedule import Decay
from unirl.config import nearest
from unirl.errors import ConfigError
from unirl.trainer.alarms import AlarmSettings
from unirl.trainer.distribution import wrong_distribution
from unirl.trainer.stages import (
    FIRST_EVALUATION,
    AlgorithmName,
    Carried,
    ModalitySettings,
    RunSettings,
    Stage,
)
from unirl.types import CriticKind

__all__ = ["check_stages"]

NEED_GROUPS: tuple[AlgorithmName, ...] = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp_baseline",
    "dapo",
    "gspo",
    "drpo",
)
"""Compare a sample with the others of its prompt, so that a group of one teaches nothing."""

NAME = re.compile(r"[\w-]+")

RANGES: Mapping[str, Callable[[float], bool]] = {
    "1 or more": lambda value: value >= 1,
    "4 or more": lambda value: value >= 4,
    "0 or more": lambda value: 0 <= value < math.inf,
    "above 0": lambda value: 0 < value < math.inf,
    "above 1": lambda value: 1 < value < math.inf,
    "from 0 to 1": lambda value: 0 <= value <= 1,
    "from 0 to 2^63 - 1": lambda value: 0 <= value < 1 << 63,
}
STAGE_RANGES = {
    "1 or more": (
        "steps",
        "prompts_per_step",
        "group_size",
        "max_words",
        "updates_per_step",
        "epochs",
        "importance_limit",
        "sampling_rounds",
        "offline_staleness",
        "success_every",
        "success_steps",
    ),
    "0 or more": (
        "critic_learning_rate",
        "warmup_steps",
        "critic_warmup_steps",
        "reference_every",
        "offline_prompts",
        "plateau_evaluations",
        "plateau_gain",
        "clip_low",
        "clip_high",
        "entropy_coef",
        "replay_prompts",
        "replay_coef",
        "kl_coef",
        "overlong_buffer",
        "overlong_factor",
    ),
    "above 0": (
        "learning_rate",
        "max_grad_norm",
        "value_clip",
        "kl_target",
        "kl_horizon",
        "entropy_target",
        "entropy_step",
        "kl_budget",
        "drpo_epsilon",
    ),
    "above 1": ("dual_clip",),
    "from 0 to 1": ("gamma", "lam", "learning_rate_floor"),
}
MODALITY_RANGES = {
    "0 or more": ("loss_weight", "kl_coef", "entropy_coef"),
    "above 0": ("kl_target", "entropy_target"),
}
SETTINGS_RANGES = {
    "1 or more": ("micro_prompts", "checkpoint_every", "keep_checkpoints"),
    "from 0 to 2^63 - 1": ("seed",),
    "0 or more": ("evaluate_every", "micro_batch_tokens", "logits_chunk", "checkpoint_every_s"),
    "above 0": ("max_logprob_gap", "stop_grace_s"),
}


def check_stages(
    stages: Sequence[Stage],
    settings: RunSettings,
    *,
    world_size: int,
    num_prompts: Mapping[str, int] | None = None,
) -> None:
    """Refuse a run that cannot work, with everything that is wrong in one error.

    Args:
        stages: The run.
        settings: What holds for all of them.
        world_size: Number of ranks.
        num_prompts: Rows that each stage's condition selects, by the stage's name; None before there is a
            store.
    """
    wrong: list[str] = []
    names = [stage.name for stage in stages]
    if len(set(names)) != len(names):
        wrong.append(f"stage names repeat: {names}; give each its own")
    if not stages:
        wrong.append("there is no stage; give at least one")
    wrong.extend(_out_of_range(settings, "settings", SETTINGS_RANGES))
    wrong.extend(_out_of_range(settings.alarms, "settings.alarms", {"4 or more": ("memory_steps",)}))
    wrong.extend(wrong_distribution(settings.distribution))
    if settings.critic not in get_args(CriticKind):
        wrong.append(
            f"settings: critic is {settings.critic!r}{nearest(settings.critic, get_args(CriticKind))}"
        )
    if settings.critic == "own" and all(stage.algorithm != "ppo" for stage in stages):
        wrong.append(
            "settings: critic is 'own', a second model, and no stage's algorithm asks a critic; set it to "
            "'shared', or take ppo"
        )
    for stage in stages:
        place = f"stage {stage.name}"
        if not NAME.fullmatch(stage.name) or stage.name == FIRST_EVALUATION:
            wrong.append(
                f"{place}: the name needs letters, digits, '-' and '_' only, and {FIRST_EVALUATION!r} is "
                "taken by the evaluation before training"
            )
        out_of_range = _out_of_range(stage, place, STAGE_RANGES)
        out_of_range += _out_of_range(stage.text, f"{place}, text", MODALITY_RANGES)
        out_of_range += _out_of_range(stage.image, f"{place}, image", MODALITY_RANGES)
        wrong.extend(out_of_range)
        wrong.extend(_wrong_critic(stage, place))
        wrong.extend(_wrong_curriculum(stage, place))
        if stage.plateau_evaluations and not settings.evaluate_every:
            wrong.append(
                f"{place}: plateau_evaluations {stage.plateau_evaluations} needs evaluations inside the "
                "stage; set evaluate_every of the settings"
            )
        wrong.extend(_wrong_algorithm(stage, place))
        wrong.extend(_wrong_sampling(stage, place))
        if settings.micro_prompts < 1 or out_of_range:
            continue
        unit = world_size * settings.micro_prompts * len(stage.directions)
        if stage.prompts_per_step % unit:
            both = " x 2 directions" if stage.direction == "both" else ""
            wrong.append(
                f"{place}: prompts_per_step {stage.prompts_per_step} is not a multiple of "
                f"{world_size} ranks x micro_prompts {settings.micro_prompts}{both} = {unit}"
            )
        if stage.direction == "both" and stage.replay_prompts:
            wrong.append(
                f"{place}: replay_prompts {stage.replay_prompts} is against forgetting the other direction, "
                "and a stage of both trains both; set it to 0"
            )
        if settings.micro_prompts % stage.updates_per_step:
            wrong.append(
                f"{place}: micro_prompts {settings.micro_prompts} is not a multiple of "
                f"updates_per_step {stage.updates_per_step}"
            )
        if stage.replay_prompts % (world_size * stage.updates_per_step):
            wrong.append(
                f"{place}: replay_prompts {stage.replay_prompts} is not a multiple of {world_size} ranks x "
                f"updates_per_step {stage.updates_per_step}"
            )
        wrong.extend(_wrong_reuse(stage, place, world_size))
        if num_prompts is not None and num_prompts[stage.name] < stage.prompts_per_step:
            wrong.append(
                f"{place}: {stage.prompts!r} selects {num_prompts[stage.name]} prompts, "
                f"a step needs {stage.prompts_per_step}"
            )
    if wrong:
        raise ConfigError("this run cannot start:\n  " + "\n  ".join(wrong))


def _wrong_algorithm(stage: Stage, place: str) -> list[str]:
    wrong = []
    if stage.algorithm not in get_args(AlgorithmName):
        wrong.append(
            f"{place}: there is no algorithm {stage.algorithm!r}"
            f"{nearest(stage.algorithm, get_args(AlgorithmName))}"
        )
    if stage.algorithm in NEED_GROUPS and stage.group_size == 1:
        wrong.append(
            f"{place}: {stage.algorithm} compares the samples of a prompt, and group_size is 1, so nothing "
            "would be learned; take 2 or more"
        )
    if stage.kl_estimator not in KL_ESTIMATORS:
        wrong.append(
            f"{place}: kl_estimator is {stage.kl_estimator!r}; choose one of {', '.join(KL_ESTIMATORS)}"
        )
    if stage.learning_rate_decay not in get_args(Decay):
        wrong.append(
            f"{place}: learning_rate_decay is {stage.learning_rate_decay!r}"
            f"{nearest(stage.learning_rate_decay, get_args(Decay))}"
        )
    if stage.overlong_buffer > stage.max_words:
        wrong.append(
            f"{place}: overlong_buffer {stage.overlong_buffer} is longer than max_words {stage.max_words}"
        )
    return wrong


def _wrong_critic(stage: Stage, place: str) -> list[str]:
    wrong = []
    if stage.critic_warmup_steps and stage.algorithm != "ppo":
        wrong.append(
            f"{place}: critic_warmup_steps {stage.critic_warmup_steps} trains the critic alone, "
            f"and {stage.algorithm} has none; set it to 0, or take ppo"
        )
    if stage.critic_warmup_steps >= stage.steps > 0:
        wrong.append(
            f"{place}: critic_warmup_steps {stage.critic_warmup_steps} leaves none of {stage.steps} steps to "
            "the policy; lower it or raise steps"
        )
    unknown = [part for part in stage.carry if part not in get_args(Carried)]
    if unknown:
        wrong.append(f"{place}: carry names {unknown[0]!r}{nearest(unknown[0], get_args(Carried))}")
    return wrong


def _wrong_reuse(stage: Stage, place: str, world_size: int) -> list[str]:
    """Samples drawn again, and samples used again."""
    wrong = []
    if stage.sampling_rounds > 1 and stage.group_size == 1:
        wrong.append(
            f"{place}: sampling_rounds {stage.sampling_rounds} looks for samples of a prompt that differ in "
            "reward, and group_size is 1; take 2 or more, or sampling_rounds=1"
        )
    if not stage.offline_prompts:
        return wrong
    unit = world_size * stage.updates_per_step
    if stage.offline_prompts % unit:
        wrong.append(
            f"{place}: offline_prompts {stage.offline_prompts} is not a multiple of {world_size} ranks x "
            f"updates_per_step {stage.updates_per_step}"
        )
    if stage.importance == "none":
        wrong.append(
            f"{place}: offline_prompts {stage.offline_prompts} learns from samples of an older policy, and "
            "importance is none; set importance to token or sequence"
        )
    if stage.direction == "both":
        wrong.append(f"{place}: offline_prompts {stage.offline_prompts} needs a stage of one direction")
    return wrong


def _wrong_curriculum(stage: Stage, place: str) -> list[str]:
    wrong = []
    steps = [0, *(lesson.from_step for lesson in stage.curriculum)]
    if any(later <= earlier for earlier, later in pairwise(steps)):
        wrong.append(
            f"{place}: curriculum begins at steps {steps[1:]}; give steps from 1 on, each later than the last"
        )
    if stage.success_window is not None and not stage.success_window[0] <= stage.success_window[1]:
        wrong.append(
            f"{place}: success_window {stage.success_window} holds no rate; give the lowest, then the highest"
        )
    if stage.success_of != "reward" and not stage.success_of.startswith("reward/"):
        wrong.append(f"{place}: success_of is {stage.success_of!r}; give reward, or reward/COMPONENT")
    return wrong


def _wrong_sampling(stage: Stage, place: str) -> list[str]:
    names = ("temperature", "guidance", "top_p", "top_k", "min_p")
    wrong = [
        f"{place}: {reason}" for reason in sampling_errors({name: getattr(stage, name) for name in names})
    ]
    if stage.importance_mask and stage.importance_mask <= 1.0:
        wrong.append(
            f"{place}: importance_mask is {stage.importance_mask}; "
            "it is a factor above 1, or 0 to mask nothing"
        )
    return wrong


def _out_of_range(
    config: Stage | ModalitySettings | RunSettings | AlarmSettings,
    place: str,
    ranges: Mapping[str, Sequence[str]],
) -> list[str]:
    return [
        f"{place}: {field} must be {words}, found {getattr(config, field)}"
        for words, fields in ranges.items()
        for field in fields
        if getattr(config, field) is not None and not RANGES[words](getattr(config, field))
    ]
