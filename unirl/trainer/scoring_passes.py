"""Which models see the samples of a step before its update, beside the update's own forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.trainer.alarms import AlarmSettings
from unirl.trainer.algorithms import ALGORITHMS
from unirl.trainer.mismatch import is_agreement_tested
from unirl.trainer.stages import Stage

__all__ = ["ScoringPasses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringPasses:
    """What is run over samples before anything is learnt from them."""

    policy: bool = True
    reference: bool = True

    @classmethod
    def needed(cls, stage: Stage, alarms: AlarmSettings, *, stage_step: int) -> ScoringPasses:
        """Leave out a pass that nothing depends on.

        A single update of a step scores the samples with the weights that they were drawn with, so agreement
        with the engine and entropy can be read off its own pass. Before it, the policy is asked where there
        are further updates, and for a critic's values, importance weights or an entropy that a bonus follows.
        The reference is asked where its divergence is charged, ends the stage or raises an alarm. Both are
        asked where their agreement is tested.

        Args:
            stage: With the coefficients of this step.
            alarms: Of the run.
            stage_step: Steps of the stage that are done.
        """
        is_checked = is_agreement_tested(stage, stage_step)
        own = [stage.of(direction) for direction in stage.directions]
        return cls(
            policy=is_checked
            or stage.updates_per_step * stage.epochs > 1
            or ALGORITHMS[stage.algorithm].uses_critic
            or stage.importance != "none"
            or any(part.entropy_target is not None for part in own),
            reference=is_checked
            or any(part.kl_coef != 0.0 for part in own)
            or stage.kl_budget is not None
            or alarms.kl is not None,
        )
