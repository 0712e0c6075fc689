"""A run as data: stages in the order in which they are trained."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from unirl.algorithms import KL_ESTIMATORS, sampling_errors
from unirl.config import nearest
from unirl.errors import ConfigError
from unirl.trainer.alarms import AlarmSettings
from unirl.trainer.distribution import Distribution, wrong_distribution
from unirl.types import Direction, SamplingSettings

__all__ = ["FIRST_EVALUATION", "AlgorithmName", "RunSettings", "Stage", "check_stages"]

AlgorithmName = Literal[
    "ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dapo", "gspo", "drpo"
]
"""`unirl.trainer.algorithms.ALGORITHMS` says what each is made of."""

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

FIRST_EVALUATION = "start"
"""What the evaluation before the first stage is called where the others have their stage's name."""

NAME = re.compile(r"[\w-]+")

RANGES: Mapping[str, Callable[[float], bool]] = {
    "1 or more": lambda value: value >= 1,
    "0 or more": lambda value: 0 <= value < math.inf,
    "above 0": lambda value: 0 < value < math.inf,
    "above 1": lambda value: 1 < value < math.inf,
    "from 0 to 1": lambda value: 0 <= value <= 1,
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
    ),
    "0 or more": (
        "critic_learning_rate",
        "warmup_steps",
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
        "drpo_epsilon",
    ),
    "above 1": ("dual_clip",),
    "from 0 to 1": ("gamma", "lam"),
}
SETTINGS_RANGES = {
    "1 or more": ("micro_prompts", "checkpoint_every", "keep_checkpoints"),
    "0 or more": ("seed", "evaluate_every", "micro_batch_tokens", "logits_chunk", "checkpoint_every_s"),
    "above 0": ("max_logprob_gap", "stop_grace_s"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """RL in one direction on one set of prompts. Weights, optimizer and critic carry over to the next."""

    name: str
    direction: Direction
    prompts: str
    """SQL condition that picks the prompts from the data store."""
    steps: int
    """Rollouts, each followed by one update phase."""

    prompts_per_step: int = 16
    """P, over all ranks."""
    group_size: int = 8
    """G."""
    temperature: float = 1.0
    guidance: float = 1.0
    """How far past the conditional logits tokens are drawn: uncond + guidance (cond - uncond). 1 is off."""
    guidance_mode: Literal["exact", "detach_uncond", "unguided"] = "exact"
    """What is trained where guidance is not 1. "exact": the guided policy, through both branches;
    "detach_uncond": the guided policy, with no gradient into the unconditional branch; "unguided": the policy
    at guidance 1 is rolled out and trained, and only evaluations are guided."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """These three cut ids off, which cannot be trained with: anything but their neutral value is refused."""
    max_words: int = 8
    """Longest text response, words without `<eos>`. The limit is part of the task: a response that reaches it
    has ended, and is scored as it stands."""

    learning_rate: float = 2e-4
    critic_learning_rate: float = 2e-3
    warmup_steps: int = 10
    """Rollouts over which the learning rate rises."""
    max_grad_norm: float = 1.0
    updates_per_step: int = 2
    """Optimizer steps in one pass over a rollout; each takes every n-th prompt."""
    epochs: int = 1
    """Passes over a rollout."""

    algorithm: AlgorithmName = "ppo"
    gamma: float = 1.0
    lam: float = 0.95
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """Largest ratio that a negative advantage is charged for; 3 is usual. None charges for any."""
    drpo_epsilon: float = 0.2
    """Shift of probability at which drpo stops pushing."""
    value_clip: float = 0.2
    """In reward units."""
    entropy_coef: float = 0.0
    replay_prompts: int = 0
    """Captioned pictures of the warm-up that each step also learns from, supervised, in the direction that
    this stage does not train. They keep the policy from forgetting it. Over all ranks."""
    replay_coef: float = 1.0
    """Weight of their loss."""
    kl_coef: float = 0.02
    """First weight of the penalty on the divergence from the reference, reward or loss per nat."""
    kl_in: Literal["reward", "loss"] | None = None
    """Whether the penalty is taken off the reward or added to the loss. None leaves it to the algorithm."""
    kl_estimator: str = "k3"
    """Of the penalty in the loss: k1, k2 or k3."""
    kl_straight_through: bool = False
    """Take the gradient of k2, which is right on-policy, whatever the estimator's value."""
    kl_target: float | None = 0.05
    """Divergence per token, nats, that the adaptive weight steers to. None keeps the first weight."""
    kl_horizon: int = 10_000
    """Samples over which the weight can change by about a fifth per unit of error."""
    importance: Literal["none", "token", "sequence"] = "none"
    """Weigh tokens, or whole responses, by how much likelier the trainer makes them than the engine did."""
    importance_limit: float = 2.0
    """Largest of these weights."""
    importance_mask: float = 0.0
    """Factor between trainer and engine, either way, beyond which the weight is 0; 0 masks nothing."""
    overlong_buffer: int = 0
    """Words before the limit over which a text is charged for its length; 0 charges nothing."""
    overlong_factor: float = 1.0
    """Charge at the limit, in reward units."""

    @property
    def sampling(self) -> SamplingSettings:
        """What is rolled out, trained and compared with the reference."""
        guidance = 1.0 if self.guidance_mode == "unguided" else self.guidance
        return SamplingSettings(temperature=self.temperature, guidance=guidance)

    @property
    def samples_per_step(self) -> int:
        """B, over all ranks."""
        return self.prompts_per_step * self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What holds for all stages."""

    alarms: AlarmSettings = field(default_factory=AlarmSettings)
    """When an alarm is raised, and whether it stops the run."""
    distribution: Distribution = field(default_factory=Distribution)
    """What each process holds and computes in."""
    seed: int = 0
    micro_prompts: int = 8
    """Prompts whose samples go through the model at once, in rollout and update. The split of work into
    forward passes does not depend on the number of ranks, so neither do the numbers."""
    micro_batch_tokens: int = 0
    """Tokens, padding included, that go through the model at once when samples are scored and learnt from:
    rows are sorted by length, packed up to this, and dealt out so that ranks have equal work. 0 keeps the
    micro-batches of the rollout, `micro_prompts` prompts each."""
    logits_chunk: int = 0
    """Positions whose logits are held at once, so that no (B, T, V) is made; the backward pass makes them a
    second time. 0 holds all."""
    checkpoint_every: int = 10
    """Steps."""
    checkpoint_every_s: float = 0.0
    """Seconds after which the end of a step is saved whatever its number; 0 counts steps alone."""
    keep_checkpoints: int = 2
    """Newest ones that stay. The one that the judge liked best stays as well."""
    stop_grace_s: float = 14.0
    """Seconds from SIGTERM or SIGUSR1 after which the process ends whatever it is doing."""
    evaluate_every: int = 0
    """Steps between evaluations inside a stage; 0 evaluates at the start and after each stage only."""
    rollout: Literal["native", "vllm"] = "native"
    """Engine that samples: the native one, or vLLM (in this process, or the server that UNIRL_ROLLOUT_URL
    names)."""
    max_logprob_gap: float = 1e-3
    """Largest difference, nats, between what the rollout says of its tokens and what the trainer says. Above
    it the first step of a stage refuses to train: the two would not be the same policy."""


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
    wrong.extend(wrong_distribution(settings.distribution))
    for stage in stages:
        place = f"stage {stage.name}"
        if not NAME.fullmatch(stage.name) or stage.name == FIRST_EVALUATION:
            wrong.append(
                f"{place}: the name needs letters, digits, '-' and '_' only, and {FIRST_EVALUATION!r} is "
                "taken by the evaluation before training"
            )
        out_of_range = _out_of_range(stage, place, STAGE_RANGES)
        wrong.extend(out_of_range)
        wrong.extend(_wrong_algorithm(stage, place))
        wrong.extend(_wrong_sampling(stage, place))
        if settings.micro_prompts < 1 or out_of_range:
            continue
        unit = world_size * settings.micro_prompts
        if stage.prompts_per_step % unit:
            wrong.append(
                f"{place}: prompts_per_step {stage.prompts_per_step} is not a multiple of "
                f"{world_size} ranks x micro_prompts {settings.micro_prompts} = {unit}"
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
    if stage.overlong_buffer > stage.max_words:
        wrong.append(
            f"{place}: overlong_buffer {stage.overlong_buffer} is longer than max_words {stage.max_words}"
        )
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


def _out_of_range(config: Stage | RunSettings, place: str, ranges: Mapping[str, Sequence[str]]) -> list[str]:
    return [
        f"{place}: {field} must be {words}, found {getattr(config, field)}"
        for words, fields in ranges.items()
        for field in fields
        if getattr(config, field) is not None and not RANGES[words](getattr(config, field))
    ]
