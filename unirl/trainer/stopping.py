"""When a stage ends: its steps are done, the judge has stopped climbing, or the divergence is spent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unirl.trainer.stages import Stage

__all__ = ["StageEnd", "Stopping"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEnd:
    """Why a stage ended."""

    reason: Literal["steps", "judge_plateau", "kl_budget"]
    message: str


class Stopping:
    """Watches one stage. What it has seen is saved with the run."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._judgements: list[float] = []
        self._divergence = 0.0

    def see_step(self, divergence: float) -> None:
        """Take in a step's mean divergence from the reference, nats a token."""
        self._divergence = divergence

    def see_judge(self, shares: Sequence[float]) -> None:
        """Take in an evaluation: the share that the judge accepts, for each direction of the stage."""
        known = [share for share in shares if math.isfinite(share)]
        if known:
            self._judgements.append(sum(known) / len(known))

    def end(self, steps_done: int) -> StageEnd | None:
        """Why the stage ends after so many steps; None if it goes on."""
        stage = self._stage
        if stage.kl_budget is not None and self._divergence > stage.kl_budget:
            return StageEnd(
                reason="kl_budget",
                message=f"divergence {self._divergence:.3g} nats a token, kl_budget {stage.kl_budget:g}",
            )
        since = self._evaluations_since_best()
        if stage.plateau_evaluations and since >= stage.plateau_evaluations:
            return StageEnd(
                reason="judge_plateau",
                message=f"the judge has not gained {stage.plateau_gain:g} in {since} evaluations, "
                f"its best is {max(self._judgements):.1%}",
            )
        if steps_done >= stage.steps:
            return StageEnd(reason="steps", message=f"all {stage.steps} steps are done")
        return None

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"judgements": list(self._judgements), "divergence": self._divergence}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._judgements, self._divergence = list(state["judgements"]), float(state["divergence"])

    def _evaluations_since_best(self) -> int:
        """Evaluations since the last that beat the best before it by the stage's gain."""
        best, place = -math.inf, 0
        for i, share in enumerate(self._judgements):
            if share > best + (self._stage.plateau_gain if i else 0.0):
                best, place = share, i
        return max(len(self._judgements) - 1 - place, 0)
