"""The loop: roll out, score, update, remember; stage after stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from storage import View
from unirl.algorithms import add_metrics, mean_metrics
from unirl.errors import AlarmError, CheckpointError
from unirl.policies.image_tokenizer import ImageTokenizer
from unirl.policies.policy import Policy, PolicyOutput
from unirl.rollout.engine import RolloutEngine
from unirl.rollout.native import NativeEngine
from unirl.trainer.collect import make_experience
from unirl.trainer.distributed import reduce_metrics
from unirl.trainer.evaluate import Evaluation, Evaluator, quality_of
from unirl.trainer.mismatch import effective_fraction, is_agreement_tested, likely_cause, require_agreement
from unirl.trainer.offline import reused_metrics
from unirl.trainer.optimizer import set_learning_rates
from unirl.trainer.preemption import Interrupted, StopAsked, StopRequest
from unirl.trainer.rank_failure import FailureWatch
from unirl.trainer.reference_refresh import is_refresh_due, load_reference, move_reference, require_movable
from unirl.trainer.run_directory import RunDirectory
from unirl.trainer.run_log import RunLog
from unirl.trainer.scoring_passes import ScoringPasses
from unirl.trainer.sharding import prepare_policy, reference_on_device
from unirl.trainer.stage_checks import check_stages
from unirl.trainer.stage_rewards import StageRewards
from unirl.trainer.stage_run import open_stages, start_anew
from unirl.trainer.stages import FIRST_EVALUATION, RunSettings, Stage
from unirl.trainer.state_keeper import Position, StateKeeper
from unirl.trainer.step_metrics import held_memory, measure, rollout_metrics, tokens_per_s
from unirl.trainer.step_samples import StepSampler
from unirl.trainer.update import update_policy
from unirl.types import Direction, Experience, Judge, Prompt, Reward

__all__ = ["Progress", "StopAsked", "Trainer"]

Progress = Callable[[str, int, int, Mapping[str, float]], None]
"""Called after each step with the stage's name, steps done in it, its number of steps, and the metrics."""


class Trainer:
    """Staged PPO on one policy. The same code runs on one process and on many.

    Every random number comes from a stream that is a function of (seed, stage, step, prompt, sample), so a
    resumed run needs no generator state and any number of ranks draws the same samples.
    """

    def __init__(
        self,
        run: RunDirectory,
        stages: Sequence[Stage],
        settings: RunSettings,
        *,
        policy: Policy,
        tokenizer: ImageTokenizer,
        reward: Reward,
        judge: Judge,
        stage_rewards: Mapping[str, Reward] | None = None,
        prompts: Mapping[str, View],
        warm_up: View | None = None,
        evaluation_prompts: Mapping[Direction, Sequence[Prompt]],
        accelerator: Accelerator,
        engine: RolloutEngine | None = None,
        on_step: Progress = lambda stage, done, total, metrics: None,
        stop: StopRequest | None = None,
    ) -> None:
        """Prepare a run, or the rest of one: the newest whole checkpoint in `run` is loaded.

        Args:
            run: Where everything is written.
            stages: Trained in order.
            settings: What holds for all stages.
            policy: Trained in place; as it is now, it also becomes the frozen reference. With LoRA adapters
                only these are trained, and the reference is the policy without them.
            tokenizer: Turns codes into the pictures that are scored.
            reward: Trained on, where a stage has none of its own.
            stage_rewards: Rewards of stages that have their own, by the stage's name.
            judge: Only watched.
            prompts: The rows that each stage trains on, by the stage's name.
            warm_up: The rows that the policy was warmed up on, for replay.
            evaluation_prompts: Held-out prompts, by direction.
            accelerator: Says which rank this is.
            engine: Samples from the policy; None takes the native engine.
            on_step: For progress bars.
            stop: Request to stop that is listened to already; None listens while `train` runs.
        """
        check_stages(
            stages,
            settings,
            world_size=accelerator.num_processes,
            num_prompts={name: len(view) for name, view in prompts.items()},
        )
        self.run_directory, self.stages, self.settings = run, stages, settings
        self.accelerator, self.on_step, self.policy = accelerator, on_step, policy
        self.rewards = StageRewards(reward, stage_rewards or {}, stages)
        policy.logits_chunk = settings.logits_chunk
        require_movable(policy, stages)
        self.engine: RolloutEngine = engine or NativeEngine(
            policy, own_weights=accelerator.is_fsdp2, max_probe_gap=settings.distribution.logprob_gap
        )
        self.model, self.optimizer, self.reference = prepare_policy(
            accelerator, settings.distribution, policy, critic=settings.critic
        )
        self.failures = FailureWatch(accelerator)
        self.position = Position()
        self.runs = open_stages(
            stages, settings, prompts, warm_up, image_size=tokenizer.image_size, accelerator=accelerator
        )
        self.stop = stop or StopRequest(grace_s=settings.stop_grace_s)
        self.keeper = StateKeeper(
            run.checkpoints,
            settings,
            model=policy,
            optimizer=self.optimizer.optimizer,
            accelerator=accelerator,
            stop=self.stop,
            state=self._state,
            on_error=self._tell_unsaved,
        )
        self.sampler = StepSampler(
            self.engine, policy, tokenizer, self.rewards, settings, self.keeper, self.failures
        )
        self.evaluator = Evaluator(
            accelerator=accelerator,
            engine=self.engine,
            policy=policy,
            tokenizer=tokenizer,
            prompts=evaluation_prompts,
            reward_of=self.rewards.of_direction,
            judge=judge,
            stages=stages,
            seed=settings.seed,
            may_stop=self.keeper.may_stop,
        )
        state = self.keeper.resume()
        self._is_new = state is None
        if state is not None:
            self._restore(state)
        self.run_log = RunLog(
            run,
            accelerator,
            self.position,
            alarms=settings.alarms,
            length=max(policy.max_response_length(d, s.max_words) for s in stages for d in s.directions),
            state=state,
        )

    def train(self) -> None:
        """Train every stage that is left; a finished run returns at once.

        Raises:
            StopAsked: After SIGTERM or SIGUSR1, with the state saved.
        """
        with self.stop, closing(self.keeper):
            try:
                with self.failures:
                    self._train()
            except Interrupted:
                self.run_log.sync()
                why = self.keeper.save_mark()
                place = f"stopped after step {self.position.step}, state"
                if why is None:
                    raise StopAsked(f"{place} saved in {self.run_directory.checkpoints}") from None
                raise StopAsked(f"{place} not saved: {why}") from None
        for run in self.runs:
            run.close()
        self.run_log.close()

    def _train(self) -> None:
        if self._is_new:
            self._evaluate(FIRST_EVALUATION)
        self.keeper.start()
        self.keeper.mark()
        while self.position.stage < len(self.stages):
            stage = self.stages[self.position.stage]
            if not self.position.is_evaluation_due:
                self._timed_step(stage)
            self._after_step(stage)
        self.keeper.finish()

    def _timed_step(self, stage: Stage) -> None:
        started = time.perf_counter()
        metrics = self._step(stage)
        elapsed = time.perf_counter() - started
        self.position.wall_s += elapsed
        self.position.step += 1
        self.position.stage_step += 1
        self.position.is_evaluation_due = True
        if "kl/reference" in metrics:
            self.runs[self.position.stage].stopping.see_step(metrics["kl/reference"])
        metrics |= {"time/step_s": elapsed} | held_memory()
        self.run_log.step(stage, metrics)
        self.on_step(stage.name, self.position.stage_step, stage.steps, metrics)

    def _step(self, stage: Stage) -> dict[str, float]:
        """One rollout and one update phase; returns the metrics over all ranks."""
        run, phases = self.runs[self.position.stage], dict[str, float]()
        critic_only = run.is_critic_only(self.position.stage_step)
        self._begin_step(stage)
        with measure(phases, "sync"):
            self.engine.sync(self.policy, self.position.step)
        drawn, drawing = self.sampler.draw(run, self.position, phases)
        reused = self.sampler.reuse(run, self.position, self.run_log.experience)
        now = run.coefficients.before_rollout()
        passes = ScoringPasses.needed(now, self.settings.alarms, stage_step=self.position.stage_step)
        with (
            measure(phases, "experience"),
            reference_on_device(self.accelerator, self.settings.distribution, self.reference),
        ):
            experiences, outputs = make_experience(
                self.accelerator,
                self.policy,
                self.reference,
                [*drawn.rollouts, *reused.rollouts],
                [*drawn.scores, *reused.scores],
                now,
                micro_batch_tokens=self.settings.micro_batch_tokens,
                passes=passes,
            )
            fresh = experiences[: len(drawn.rollouts)]
            seen = self._look(stage, fresh, outputs[: len(fresh)])
        with measure(phases, "update"):
            self.keeper.before_update()
            now = run.coefficients.before_update(seen)
            updated = update_policy(
                self.accelerator,
                self.model,
                self.optimizer,
                experiences,
                now,
                replay=run.next_replay(),
                micro_batch_tokens=self.settings.micro_batch_tokens,
                critic_only=critic_only,
                with_agreement=not passes.policy,
            )
        with measure(phases, "log"):
            shown = self.run_log.samples(
                self.policy, stage, fresh, drawn.samples, micro_prompts=self.settings.micro_prompts
            )
        updated |= reused_metrics(experiences[len(fresh) :], step=self.position.step)
        metrics = mean_metrics({**seen, **reduce_metrics(self.accelerator, updated)}) | drawing
        if stage.importance != "none":
            metrics["importance/effective_fraction"] = effective_fraction(metrics)
        metrics["policy/learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        metrics |= shown | phases | {"time/rollout_tokens_per_s": tokens_per_s(fresh)} | run.metrics(now)
        if not critic_only:
            run.coefficients.adapt(seen)
        return metrics

    def _begin_step(self, stage: Stage) -> None:
        """Learning rates, what the stage does not carry over, and the reference where it is to move."""
        step, stage_step = self.position.step, self.position.stage_step
        set_learning_rates(self.optimizer, stage, stage_step=stage_step)
        self.runs[self.position.stage].choose_prompts(
            self.accelerator, self.run_log.experience, step=step, stage_step=stage_step
        )
        if stage_step == 0 and self.position.stage > 0:
            self.keeper.wait_for_copy()
            start_anew(self.policy, self.optimizer.optimizer, stage)
        if is_refresh_due(stage, stage_step=stage_step, is_first_stage=self.position.stage == 0):
            move_reference(
                self.run_directory.references,
                self.reference,
                self.policy,
                step=step,
                named=self.keeper.named_references(),
                is_main=self.accelerator.is_main_process,
            )
            self.position.reference_step = step

    def _look(
        self, stage: Stage, experiences: Sequence[Experience], outputs: Sequence[PolicyOutput | None]
    ) -> dict[str, Tensor]:
        """Metric sums before the update, over all ranks; refuses to train on another policy's samples."""
        parts = [rollout_metrics(*part, stage) for part in zip(experiences, outputs, strict=True)]
        seen = reduce_metrics(self.accelerator, add_metrics(parts))
        if is_agreement_tested(stage, self.position.stage_step):
            require_agreement(
                seen,
                place=f"stage {stage.name}, first step",
                allowed=max(self.settings.max_logprob_gap, self.settings.distribution.logprob_gap),
                is_start=self.position.step == 0,
                cause=lambda: likely_cause(self.policy, self.reference, experiences[0].rollout, stage),
            )
        return seen

    def _after_step(self, stage: Stage) -> None:
        """Evaluate, end the stage and save, each where it is due."""
        done, every = self.position.stage_step, self.settings.evaluate_every
        self.keeper.mark()
        self.keeper.look()
        stopping, evaluations = self.runs[self.position.stage].stopping, dict[Direction, Evaluation]()
        if every and done % every == 0:
            evaluations = self._evaluate(stage.name)
            stopping.see_evaluation(quality_of(evaluations[d] for d in stage.directions if d in evaluations))
        end = stopping.end(done)
        if end is not None:
            evaluations = evaluations or self._evaluate(stage.name)
            self.run_log.end_of_stage(stage, end)
            self.position.stage, self.position.stage_step = self.position.stage + 1, 0
        self.position.is_evaluation_due = False
        self.keeper.mark()
        alarms = self.run_log.alarms_of_step() if self.settings.alarms.stop else []
        if self.keeper.is_due(self.position.step) or alarms or end is not None:
            self.run_log.sync()
            self.keeper.save(step=self.position.step, quality=quality_of(evaluations.values()))
        if self.keeper.is_stop_asked():
            raise Interrupted
        if alarms:
            self.keeper.finish()
            raise AlarmError(
                f"stopped after step {self.position.step} by an alarm, state saved: {'; '.join(alarms)}; "
                "started again, the run goes on until the next alarm"
            )

    def _evaluate(self, name: str) -> dict[Direction, Evaluation]:
        """Judge all directions on the held-out prompts."""
        started = time.perf_counter()
        self.engine.sync(self.policy, self.position.step)
        found: dict[Direction, Evaluation] = {}
        for direction in self.evaluator.prompts:
            found[direction] = self.evaluator.evaluate(direction)
            self.run_log.evaluation(name, direction, found[direction])
        self.position.wall_s += time.perf_counter() - started
        return found

    def _state(self) -> dict[str, Any]:
        """Everything but weights, optimizer and generators, as JSON values."""
        return {
            "position": asdict(self.position),
            "stages": [run.state_dict() for run in self.runs],
            **self.run_log.state_dict(),
            "reward": self.rewards.state_dict(),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.position = Position(**state["position"])
        for run, kept in zip(self.runs, state["stages"], strict=True):
            run.load_state_dict(kept)
        if self.position.reference_step:
            load_reference(self.run_directory.references, self.reference, step=self.position.reference_step)
        self.rewards.load_state_dict(state["reward"])

    def _tell_unsaved(self, error: CheckpointError) -> None:
        self.run_log.unsaved(self.stages[min(self.position.stage, len(self.stages) - 1)], error)
