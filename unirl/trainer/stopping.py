"""When a stage ends: its steps are done, it has stopped getting better, or the divergence is spent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unirl.trainer.evaluate import Quality
from unirl.trainer.stages import Stage

__all__ = ["StageEnd", "Stopping"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEnd:
    """Why a stage ended."""

    reason: Literal["steps", "judge_plateau", "reward_plateau", "kl_budget"]
    message: str


class Stopping:
    """Watches one stage. What it has seen is saved with the run."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._judgements: list[float] = []
        self._rewards: list[float] = []
        self._divergence = 0.0

    def see_step(self, divergence: float) -> None:
        """Take in a step's mean divergence from the reference, nats a token."""
        self._divergence = divergence

    def see_evaluation(self, quality: Quality) -> None:
        """Take in what an evaluation says of the directions of the stage."""
        if quality.judge is not None:
            self._judgements.append(quality.judge)
        if quality.reward is not None:
            self._rewards.append(quality.reward)

    def end(self, steps_done: int) -> StageEnd | None:
        """Why the stage ends after so many steps; None if it goes on."""
        stage = self._stage
        if stage.kl_budget is not None and self._divergence > stage.kl_budget:
            return StageEnd(
                reason="kl_budget",
                message=f"divergence {self._divergence:.3g} nats a token, kl_budget {stage.kl_budget:g}",
            )
        measure, seen = ("judge", self._judgements) if self._judgements else ("reward", self._rewards)
        since = self._evaluations_since_best(seen)
        if stage.plateau_evaluations and since >= stage.plateau_evaluations:
            best = f"{max(seen):.1%}" if measure == "judge" else f"{max(seen):.3g}"
            return StageEnd(
                reason="judge_plateau" if measure == "judge" else "reward_plateau",
                message=f"the {measure} has not gained {stage.plateau_gain:g} in {since} evaluations, "
                f"its best is {best}",
            )
        if steps_done >= stage.steps:
            return StageEnd(reason="steps", message=f"all {stage.steps} steps are done")
        return None

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "judgements": list(self._judgements),
            "rewards": list(self._rewards),
            "divergence": self._divergence,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._judgements, self._rewards = list(state["judgements"]), list(state.get("rewards", ()))
        self._divergence = float(state["divergence"])

    def _evaluations_since_best(self, seen: Sequence[float]) -> int:
        """Evaluations since the last that beat the best before it by the stage's gain."""
        best, place = -math.inf, 0
        for i, value in enumerate(seen):
            if value > best + (self._stage.plateau_gain if i else 0.0):
                best, place = value, i
        return max(len(seen) - 1 - place, 0)
