"""Which reward belongs to which stage, and what those with running statistics have seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator

from unirl.rewards.ensemble import AdaptiveReward
from unirl.trainer.distributed import gather_rows
from unirl.trainer.stages import Stage
from unirl.types import Direction, Reward, Scores

__all__ = ["StageRewards"]


class StageRewards:
    """The run's reward, and those of stages that have their own."""

    def __init__(self, reward: Reward, own: Mapping[str, Reward], stages: Sequence[Stage]) -> None:
        """Take them over.

        Args:
            reward: Of every stage that is not in `own`.
            own: By the stage's name.
            stages: All stages of the run.
        """
        self._reward, self._own, self._stages = reward, own, stages

    def of(self, stage: Stage) -> Reward:
        """What a stage is trained on."""
        return self._own.get(stage.name, self._reward)

    def of_direction(self, direction: Direction) -> Reward:
        """What evaluations of one direction are scored with, the same all through the run: the reward of the
        last stage that trains it."""
        trained = [stage for stage in self._stages if direction in stage.directions]
        return self.of(trained[-1]) if trained else self._reward

    def adapt(self, accelerator: Accelerator, stage: Stage, scores: Sequence[Scores]) -> None:
        """Let a reward with running statistics see the step's scores of all ranks."""
        reward = self.of(stage)
        if isinstance(reward, AdaptiveReward):
            for part in gather_rows(accelerator, scores):
                reward.adapt(part)

    def state_dict(self) -> dict[str, Any]:
        """JSON values: the run's own statistics, and those of each stage that has a reward of its own."""
        return {
            "run": _state(self._reward),
            "stages": {name: _state(reward) for name, reward in self._own.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        kept = [(self._reward, state["run"])]
        kept += [(reward, state["stages"][name]) for name, reward in self._own.items()]
        for reward, statistics in kept:
            if isinstance(reward, AdaptiveReward):
                reward.load_state_dict(statistics)


def _state(reward: Reward) -> Mapping[str, Any]:
    return reward.state_dict() if isinstance(reward, AdaptiveReward) else {}
