"""The loop: roll out, score, update, remember; stage after stage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np
from accelerate import Accelerator
from torch import Tensor

from storage import View
from unirl.algorithms import add_metrics, learning_rate_factor, mean_metrics
from unirl.errors import AlarmError, CheckpointError
from unirl.policies.image_tokenizer import ImageTokenizer
from unirl.policies.policy import Policy, PolicyOutput
from unirl.rollout.engine import RolloutEngine
from unirl.rollout.native import NativeEngine
from unirl.trainer.alarms import Alarm, AlarmWatch
from unirl.trainer.algorithms import ALGORITHMS
from unirl.trainer.collect import make_experience
from unirl.trainer.distributed import gather_rows, reduce_metrics
from unirl.trainer.evaluate import Evaluation, evaluate_policy, evaluation_sampling
from unirl.trainer.experience import ExperienceLog, Row, evaluation_rows, experience_rows
from unirl.trainer.metrics import MetricsLog
from unirl.trainer.mismatch import effective_fraction, likely_cause, require_agreement
from unirl.trainer.offline import reused_metrics
from unirl.trainer.preemption import Interrupted, StopAsked, StopRequest
from unirl.trainer.rank_failure import FailureWatch
from unirl.trainer.reference_refresh import (
    is_refresh_due,
    load_reference,
    refresh_reference,
    require_movable,
    save_reference,
)
from unirl.trainer.run_directory import RunDirectory
from unirl.trainer.sample_statistics import sample_metrics
from unirl.trainer.sharding import prepare_policy, reference_on_device
from unirl.trainer.stage_checks import check_stages
from unirl.trainer.stage_rewards import StageRewards
from unirl.trainer.stage_run import open_stages, start_anew
from unirl.trainer.stages import FIRST_EVALUATION, RunSettings, Stage
from unirl.trainer.state_keeper import Position, StateKeeper
from unirl.trainer.step_metrics import measure, resident_bytes, rollout_metrics, row_metrics, tokens_per_s
from unirl.trainer.step_samples import StepSampler
from unirl.trainer.stopping import StageEnd
from unirl.trainer.trackers import named_trackers, open_trackers
from unirl.trainer.update import update_policy
from unirl.types import (
    Direction,
    Experience,
    Judge,
    Prompt,
    Reward,
    Sample,
)

__all__ = ["Progress", "StopAsked", "Trainer"]

log = logging.getLogger("unirl.trainer")

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
        self.tokenizer, self.judge = tokenizer, judge
        self.rewards = StageRewards(reward, stage_rewards or {}, stages)
        self.evaluation_prompts, self.accelerator, self.on_step = evaluation_prompts, accelerator, on_step
        self.policy = policy
        policy.logits_chunk = settings.logits_chunk
        require_movable(policy, stages)
        self.engine: RolloutEngine = engine or NativeEngine(policy, own_weights=accelerator.is_fsdp2)
        self.model, self.optimizer, self.reference = prepare_policy(
            accelerator, settings.distribution, policy
        )
        self.failures = FailureWatch(accelerator)
        self.position = Position()
        self.runs = open_stages(
            stages,
            settings,
            prompts,
            warm_up,
            image_size=tokenizer.image_size,
            accelerator=accelerator,
        )
        self.stop = stop or StopRequest(grace_s=settings.stop_grace_s)
        self.experience = self.metrics = None
        self.watch = AlarmWatch(settings.alarms)
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
        state = self.keeper.resume()
        self._is_new = state is None
        if state is not None:
            self._restore(state)
        if accelerator.is_main_process:
            length = max(policy.max_response_length(d, s.max_words) for s in stages for d in s.directions)
            self.experience = ExperienceLog(run.experience, length=length)
            self.experience.restore(0 if state is None else state["experience_snapshot"])
            self.metrics = MetricsLog(
                run.path,
                last_step=-1 if state is None else self.position.step,
                num_lines=None if state is None else state["metrics_lines"],
                trackers=open_trackers(named_trackers(), run.path),
            )
            for line in self.metrics.lines():
                self.watch.see(line)

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
                why = self.keeper.save_mark()
                place = f"stopped after step {self.position.step}, state"
                if why is None:
                    raise StopAsked(f"{place} saved in {self.run_directory.checkpoints}") from None
                raise StopAsked(f"{place} not saved: {why}") from None
        for run in self.runs:
            run.close()
        if self.metrics is not None:
            self.metrics.close()

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
        self.runs[self.position.stage].stopping.see_step(metrics["kl/reference"])
        metrics |= {"time/step_s": elapsed, "memory/rss_bytes": resident_bytes()}
        labels = {"stage": stage.name, "direction": stage.direction, "kind": "train"}
        self._log(labels, metrics)
        self.on_step(stage.name, self.position.stage_step, stage.steps, metrics)

    def _step(self, stage: Stage) -> dict[str, float]:
        """One rollout and one update phase; returns the metrics over all ranks."""
        run, phases = self.runs[self.position.stage], dict[str, float]()
        critic_only = run.is_critic_only(self.position.stage_step)
        self._begin_step(stage)
        with measure(phases, "sync"):
            self.engine.sync(self.policy, self.position.step)
        drawn, drawing = self.sampler.draw(run, self.position, phases)
        reused = self.sampler.reuse(run, self.position, self.experience)
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
                run.coefficients.before_rollout(),
                micro_batch_tokens=self.settings.micro_batch_tokens,
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
            )
        with measure(phases, "log"):
            rows = self._remember(stage, fresh, drawn.samples)
        updated |= reused_metrics(experiences[len(fresh) :], step=self.position.step)
        metrics = mean_metrics({**seen, **reduce_metrics(self.accelerator, updated)}) | drawing
        if stage.importance != "none":
            metrics["importance/effective_fraction"] = effective_fraction(metrics)
        metrics |= row_metrics(rows) | sample_metrics(rows) | phases
        metrics["time/rollout_tokens_per_s"] = tokens_per_s(fresh)
        metrics |= run.coefficients.metrics(now)
        if stage.success_window is not None:
            metrics["curriculum/kept_fraction"] = run.curriculum.kept_fraction
        if not critic_only:
            run.coefficients.adapt(seen)
        return metrics

    def _begin_step(self, stage: Stage) -> None:
        """Learning rates, what the stage does not carry over, and the reference where it is to move."""
        step, stage_step = self.position.step, self.position.stage_step
        self._set_learning_rates(stage)
        self.runs[self.position.stage].choose_prompts(
            self.accelerator, self.experience, step=step, stage_step=stage_step
        )
        if stage_step == 0 and self.position.stage > 0:
            self.keeper.wait_for_copy()
            start_anew(self.policy, self.optimizer.optimizer, stage)
        if is_refresh_due(stage, stage_step=stage_step, is_first_stage=self.position.stage == 0):
            refresh_reference(self.reference, self.policy)
            self.position.reference_step = step
            settings = self.settings
            save_reference(
                self.run_directory.references,
                self.reference,
                step=step,
                oldest=step - settings.checkpoint_every * (settings.keep_checkpoints + 1),
                is_main=self.accelerator.is_main_process,
            )

    def _look(
        self, stage: Stage, experiences: Sequence[Experience], outputs: Sequence[PolicyOutput]
    ) -> dict[str, Tensor]:
        """Metric sums before the update, over all ranks; refuses to train on another policy's samples."""
        parts = [rollout_metrics(*part, stage) for part in zip(experiences, outputs, strict=True)]
        seen = reduce_metrics(self.accelerator, add_metrics(parts))
        if self.position.stage_step in (0, stage.critic_warmup_steps):
            require_agreement(
                seen,
                place=f"stage {stage.name}, first step",
                allowed=max(self.settings.max_logprob_gap, self.settings.distribution.logprob_gap),
                is_start=self.position.step == 0,
                cause=lambda: likely_cause(self.policy, self.reference, experiences[0].rollout, stage),
            )
        return seen

    def _remember(
        self, stage: Stage, experiences: Sequence[Experience], samples: Sequence[Sequence[Sample]]
    ) -> list[Row]:
        """Write the samples of all ranks to the experience store; returns their rows."""
        step = self.position.step + 1
        labels: dict[str, str | int] = {"stage": stage.name, "step": step, "policy_version": step - 1}
        size = self.settings.micro_prompts
        first = self._first_prompt(size * len(experiences))
        mine = [
            row
            for i, (experience, part) in enumerate(zip(experiences, samples, strict=True))
            for row in experience_rows(self.policy, experience, part, labels, first_prompt=first + i * size)
        ]
        rows = gather_rows(self.accelerator, mine)
        if self.experience is not None:
            self.experience.write(rows, message=f"stage {stage.name}, step {step}")
        return rows

    def _first_prompt(self, prompts_per_rank: int) -> int:
        """Number within the step, over all ranks, of this rank's first prompt."""
        return int(self.accelerator.process_index * prompts_per_rank)

    def _after_step(self, stage: Stage) -> None:
        done, every = self.position.stage_step, self.settings.evaluate_every
        self.keeper.mark()
        self.keeper.look()
        stopping, judged = self.runs[self.position.stage].stopping, dict[Direction, float]()
        if every and done % every == 0:
            judged = self._evaluate(stage.name)
            stopping.see_judge([judged[d] for d in stage.directions if d in judged])
        end = stopping.end(done)
        if end is not None:
            judged = judged or self._evaluate(stage.name)
            self._log_end(stage, end)
            self.position.stage, self.position.stage_step = self.position.stage + 1, 0
        self.position.is_evaluation_due = False
        self.keeper.mark()
        alarms = self._alarms_that_stop()
        if self.keeper.is_due(self.position.step) or alarms or end is not None:
            judge = float(np.mean(list(judged.values()))) if judged else None
            self.keeper.save(step=self.position.step, judge=judge)
        if self.keeper.is_stop_asked():
            raise Interrupted
        if alarms:
            self.keeper.finish()
            raise AlarmError(
                f"stopped after step {self.position.step} by an alarm, state saved: {'; '.join(alarms)}; "
                "started again, the run goes on until the next alarm"
            )

    def _alarms_that_stop(self) -> list[str]:
        """What the alarms of the step just done say, on every rank, where alarms stop the run."""
        if not self.settings.alarms.stop:
            return []
        raised = [alarm.message for alarm in self.watch.raised if alarm.step == self.position.step]
        return list(gather_rows(self.accelerator, raised))

    def _evaluate(self, name: str) -> dict[Direction, float]:
        """Judge both directions on the held-out prompts; return the share that the judge accepts."""
        judged: dict[Direction, float] = {}
        started = time.perf_counter()
        self.engine.sync(self.policy, self.position.step)
        for direction, prompts in self.evaluation_prompts.items():
            evaluation = evaluate_policy(
                self.accelerator,
                self.policy,
                self.tokenizer,
                prompts,
                self.rewards.of_direction(direction),
                self.judge,
                engine=self.engine,
                sampling=evaluation_sampling(self.stages, direction),
                seed=self.settings.seed,
                max_words=max(stage.max_words for stage in self.stages),
                may_stop=self.keeper.may_stop,
            )
            self._record_evaluation(name, direction, evaluation)
            judged[direction] = evaluation.accuracy
        self.position.wall_s += time.perf_counter() - started
        return judged

    def _record_evaluation(self, name: str, direction: Direction, evaluation: Evaluation) -> None:
        step = self.position.step
        labels: dict[str, str | int] = {"stage": name, "step": step, "policy_version": step}
        rows = evaluation_rows(evaluation, labels, f"{name}/{direction}")
        self._log(
            {"stage": name, "direction": direction, "kind": "eval"}, evaluation.metrics | sample_metrics(rows)
        )
        if self.experience is not None:
            self.experience.write(rows, message=f"evaluation {name}, {direction}")

    def _log(self, labels: Mapping[str, str], values: Mapping[str, float]) -> None:
        if self.metrics is None:
            return
        place = {"stage_step": self.position.stage_step, "wall_s": round(self.position.wall_s, 3)}
        line = self.metrics.write(self.position.step, {**labels, **place}, values)
        for alarm in self.watch.see(line):
            self._raise_alarm(alarm)

    def _raise_alarm(self, alarm: Alarm) -> None:
        log.warning("alarm %s, stage %s: %s", alarm.name, alarm.stage, alarm.message)
        if self.metrics is not None:
            place = {"stage_step": self.position.stage_step, "wall_s": round(self.position.wall_s, 3)}
            about = {"stage": alarm.stage, "direction": alarm.direction, "kind": "alarm"}
            words = {"alarm": alarm.name, "message": alarm.message}
            self.metrics.write(self.position.step, {**about, **words, **place}, alarm.evidence)

    def _log_end(self, stage: Stage, end: StageEnd) -> None:
        """Say why a stage ended, and write it down where it was not for its number of steps."""
        log.info("stage %s ends after step %d: %s", stage.name, self.position.stage_step, end.message)
        if end.reason == "steps":
            return
        about = {"stage": stage.name, "direction": stage.direction, "kind": "end"}
        self._log({**about, "reason": end.reason, "message": end.message}, {})

    def _set_learning_rates(self, stage: Stage) -> None:
        factor = learning_rate_factor(
            self.position.stage_step,
            warmup_steps=stage.warmup_steps,
            total_steps=max(stage.steps, stage.warmup_steps),
        )
        critic_rate = stage.critic_learning_rate if ALGORITHMS[stage.algorithm].uses_critic else 0.0
        for group, rate in zip(self.optimizer.param_groups, (stage.learning_rate, critic_rate), strict=True):
            group["lr"] = factor * rate

    def _state(self) -> dict[str, Any]:
        """Everything but weights, optimizer and generators, as JSON values."""
        return {
            "position": asdict(self.position),
            "stages": [run.state_dict() for run in self.runs],
            "experience_snapshot": self.experience.snapshot_id if self.experience else None,
            "metrics_lines": self.metrics.num_lines if self.metrics else None,
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
        """Training goes on without the checkpoint, and says so."""
        stage = self.stages[min(self.position.stage, len(self.stages) - 1)]
        message = f"a checkpoint could not be written, training goes on: {error}"
        self._raise_alarm(
            Alarm(
                name="checkpoint",
                stage=stage.name,
                direction=stage.direction,
                step=self.position.step,
                message=message,
            )
        )
