"""The samples of a step: drawn for its prompts and scored, and taken out of the experience again."""

from __future__ import annotations

from unirl.policies.image_tokenizer import ImageTokenizer
from unirl.policies.policy import Policy
from unirl.rollout.engine import RolloutEngine
from unirl.trainer.collect import roll_out, samples_of, split_scores
from unirl.trainer.dynamic_sampling import Drawn, draw_informative
from unirl.trainer.experience import ExperienceLog
from unirl.trainer.in_flight import ScoredStep
from unirl.trainer.offline import Reused, choose_stored, reuse_stored
from unirl.trainer.rank_failure import FailureWatch
from unirl.trainer.stage_rewards import StageRewards
from unirl.trainer.stage_run import StageRun
from unirl.trainer.stages import RunSettings
from unirl.trainer.state_keeper import Position, StateKeeper
from unirl.trainer.step_metrics import measure
from unirl.trainer.true_responses import TrueResponses
from unirl.types import Rollout, Sample

__all__ = ["StepSampler"]


class StepSampler:
    """Gives each step what it learns from."""

    def __init__(
        self,
        engine: RolloutEngine,
        policy: Policy,
        tokenizer: ImageTokenizer,
        rewards: StageRewards,
        settings: RunSettings,
        keeper: StateKeeper,
        failures: FailureWatch,
    ) -> None:
        """Take over what samples are made with.

        `keeper` says when a request to stop is honoured; `failures` is told what is being worked on.
        """
        self._engine, self._policy, self._tokenizer = engine, policy, tokenizer
        self._rewards, self._settings, self._keeper = rewards, settings, keeper
        self._accelerator, self._failures = keeper.accelerator, failures

    def draw(
        self, run: StageRun, position: Position, phases: dict[str, float]
    ) -> tuple[Drawn, dict[str, float]]:
        """This rank's share of the step's samples, scored, and metrics of the drawing.

        What was drawn and scored before a stop is taken as it was.

        Args:
            run: The stage.
            position: Before the step.
            phases: Gets time and memory of rollout and reward.
        """
        known = self._kept(run, position, phases)
        if known is not None:
            drawn, metrics = known
        else:
            drawn, metrics = draw_informative(
                self._accelerator,
                run.stage,
                lambda number: self._round(run, position, number, phases),
                rounds=1 if run.is_critic_only(position.stage_step) else run.stage.sampling_rounds,
                micro_prompts=self._settings.micro_prompts,
            )
            cursor = {"stage": run.state_dict(), "drawing": metrics}
            scored = ScoredStep(rollouts=drawn.rollouts, scores=drawn.scores, cursor=cursor)
            self._keeper.keep_scored(position.step + 1, scored)
        self._rewards.adapt(self._accelerator, run.stage, drawn.scores)
        return drawn, metrics

    def reuse(self, run: StageRun, position: Position, experience: ExperienceLog | None) -> Reused:
        """This rank's share of earlier samples that the step also learns from.

        Args:
            run: The stage.
            position: Before the step.
            experience: Of the run, on one rank.
        """
        if not run.stage.offline_prompts:
            return Reused()
        groups = (
            []
            if experience is None
            else choose_stored(experience.store, run.stage, step=position.step, seed=self._settings.seed)
        )
        return reuse_stored(
            self._accelerator,
            self._policy,
            run.curriculum.store,
            groups,
            run.stage,
            image_size=self._tokenizer.image_size,
            micro_prompts=self._settings.micro_prompts,
        )

    def _kept(
        self, run: StageRun, position: Position, phases: dict[str, float]
    ) -> tuple[Drawn, dict[str, float]] | None:
        with self._keeper.may_stop(), measure(phases, "rollout"):
            known = self._keeper.scored(position.step + 1)
            samples = [] if known is None else [self._samples(rollout) for rollout in known.rollouts]
        if known is None:
            return None
        phases["time/reward_s"] = 0.0
        run.load_state_dict(known.cursor["stage"])
        return Drawn(rollouts=known.rollouts, samples=samples, scores=known.scores), known.cursor["drawing"]

    def _samples(self, rollout: Rollout) -> list[Sample]:
        return samples_of(self._policy, self._tokenizer, rollout)

    def _round(self, run: StageRun, position: Position, number: int, phases: dict[str, float]) -> Drawn:
        with self._keeper.may_stop(), measure(phases, "rollout"):
            rollouts, samples = self._roll_out(run, position, number)
        with self._keeper.may_stop(), measure(phases, "reward"):
            scored = self._rewards.of(run.stage).score([s for part in samples for s in part])
            scores = split_scores(scored, samples)
        return Drawn(rollouts=rollouts, samples=samples, scores=scores)

    def _roll_out(
        self, run: StageRun, position: Position, number: int
    ) -> tuple[list[Rollout], list[list[Sample]]]:
        """This rank's share of the next prompts, sampled from and turned into what a reward sees."""
        stage, size = run.stage, self._settings.micro_prompts
        place = f"stage {stage.name}, step {position.step + 1}"
        self._failures.at(place)
        prompts = run.next_prompts(position.stage_step)
        self._failures.at(f"{place}, prompts {', '.join(prompt.key for prompt in prompts)}")
        first = self._accelerator.process_index * len(prompts) + number * stage.prompts_per_step
        from_data = run.is_critic_only(position.stage_step) and stage.critic_warmup_from == "data"
        rollouts = [
            rollout
            for start in range(0, len(prompts), size)
            for rollout in roll_out(
                TrueResponses(self._policy) if from_data else self._engine,
                prompts[start : start + size],
                group_size=stage.group_size,
                length=self._policy.max_response_length(prompts[start].direction, stage.max_words),
                sampling=stage.sampling,
                seeds=[(self._settings.seed, position.step + 1, first + start + i) for i in range(size)],
                micro_prompts=size,
            )
        ]
        return rollouts, [self._samples(rollout) for rollout in rollouts]
