"""The same prompts, the same random numbers, before and after: how good is the policy?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from accelerate import Accelerator

from unirl.errors import ConfigError
from unirl.policies.image_tokenizer import ImageTokenizer
from unirl.policies.policy import Policy
from unirl.rollout.engine import RolloutEngine
from unirl.trainer.collect import roll_out, samples_of
from unirl.trainer.distributed import gather_rows
from unirl.trainer.stages import Stage
from unirl.types import Direction, Judge, Prompt, Reward, Sample, SamplingSettings, Scores

__all__ = [
    "Evaluation",
    "Evaluator",
    "Quality",
    "evaluate_policy",
    "evaluation_sampling",
    "quality_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One sample for each evaluation prompt, with what reward and judge say of it."""

    samples: Sequence[Sample]
    scores: Scores
    """What the reward says of them."""
    judgements: np.ndarray
    """float64 (P,), 1 where the held-out judge agrees, NaN where it could not tell."""

    @property
    def reward(self) -> float:
        """Mean over scored samples; NaN if there are none."""
        return _mean(self.scores.total)

    @property
    def accuracy(self) -> float:
        """Share of samples that the judge accepts."""
        return _mean(self.judgements)

    @property
    def numbers(self) -> dict[str, float | None]:
        """The metrics with None for NaN, as JSON wants it."""
        return {name: value if np.isfinite(value) else None for name, value in self.metrics.items()}

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of an evaluation line."""
        known = self.scores.total[~np.isnan(self.scores.total)]
        return {
            "eval/judge": self.accuracy,
            "eval/reward": self.reward,
            "eval/reward_std": float(known.std()) if len(known) else float("nan"),
            "eval/num": float(len(self.samples)),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """By which policies of one run are compared: the judge, and the reward where no direction has a judge."""

    judge: float | None = None
    """Mean over the directions that have one; None if none has, or none was asked."""
    reward: float | None = None
    """Mean over the directions; None if none was scored."""


def quality_of(evaluations: Iterable[Evaluation]) -> Quality:
    """What evaluations of one policy, one for each direction, say of it."""
    found = list(evaluations)
    judge, reward = (
        _mean(np.array(values, dtype=np.float64))
        for values in ([e.accuracy for e in found], [e.reward for e in found])
    )
    return Quality(judge=None if np.isnan(judge) else judge, reward=None if np.isnan(reward) else reward)


def evaluation_sampling(stages: Sequence[Stage], direction: Direction) -> SamplingSettings:
    """Temperature 1, guided as the last stage of this direction is; the same for the whole run."""
    guidances = [stage.guidance for stage in stages if direction in stage.directions]
    return SamplingSettings(guidance=guidances[-1] if guidances else 1.0)


def evaluate_policy(
    accelerator: Accelerator,
    policy: Policy,
    tokenizer: ImageTokenizer,
    prompts: Sequence[Prompt],
    reward: Reward,
    judge: Judge,
    *,
    engine: RolloutEngine,
    sampling: SamplingSettings,
    seed: int,
    max_words: int,
    micro_prompts: int = 128,
    may_stop: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Evaluation:
    """Sample once from each prompt and score; ranks share the work.

    The random numbers of prompt p depend on `seed` and p alone, so that two evaluations of one run differ
    by the policy and by nothing else. Training never uses step 0, so its random numbers are others. Work is
    done in a block of `may_stop`.

    Raises:
        ConfigError: If there are fewer prompts than ranks.
    """
    rank, world_size = accelerator.process_index, accelerator.num_processes
    if len(prompts) < world_size:
        raise ConfigError(
            f"{len(prompts)} evaluation prompts for {world_size} ranks; give each rank one or more"
        )
    mine = range(rank, len(prompts), world_size)
    direction = prompts[0].direction
    with may_stop():
        rollouts = roll_out(
            engine,
            [prompts[i] for i in mine],
            group_size=1,
            length=policy.max_response_length(direction, max_words),
            sampling=sampling,
            seeds=[(seed, 0, i) for i in mine],
            micro_prompts=micro_prompts,
        )
        samples = [sample for rollout in rollouts for sample in samples_of(policy, tokenizer, rollout)]
        scores, judgements = reward.score(samples), judge.judge(samples)
    parts = gather_rows(accelerator, [(list(mine), samples, scores, judgements)])
    order = np.argsort(np.concatenate([part[0] for part in parts]))
    gathered = [sample for part in parts for sample in part[1]]
    return Evaluation(
        samples=[gathered[i] for i in order],
        scores=Scores(
            total=np.concatenate([part[2].total for part in parts])[order],
            components={
                name: np.concatenate([part[2].components[name] for part in parts])[order]
                for name in scores.components
            },
        ),
        judgements=np.concatenate([part[3] for part in parts])[order],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Evaluates the policy of a run, in the same way each time."""

    accelerator: Accelerator
    engine: RolloutEngine
    """Samples with the weights that it was last synced to."""
    policy: Policy
    tokenizer: ImageTokenizer
    prompts: Mapping[Direction, Sequence[Prompt]]
    """Held-out prompts, by direction."""
    reward_of: Callable[[Direction], Reward]
    judge: Judge
    stages: Sequence[Stage]
    """Of the run: they say how long a text may be and how drawings are guided."""
    seed: int
    may_stop: Callable[[], AbstractContextManager[None]]
    """Opens the block in which work is done, see `evaluate_policy`."""

    def evaluate(self, direction: Direction) -> Evaluation:
        """Judge one direction on its held-out prompts."""
        return evaluate_policy(
            self.accelerator,
            self.policy,
            self.tokenizer,
            self.prompts[direction],
            self.reward_of(direction),
            self.judge,
            engine=self.engine,
            sampling=evaluation_sampling(self.stages, direction),
            seed=self.seed,
            max_words=max(stage.max_words for stage in self.stages),
            may_stop=self.may_stop,
        )


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
