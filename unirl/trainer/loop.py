"""The loop: roll out, score, update, remember; stage after stage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np
import psutil
from accelerate import Accelerator
from torch import Tensor

from storage import View
from unirl.algorithms import AdaptiveKL, add_metrics, learning_rate_factor, mean_metrics
from unirl.errors import AlarmError, CheckpointError, ConfigError
from unirl.policies.image_tokenizer import ImageTokenizer
from unirl.policies.policy import Policy, PolicyOutput
from unirl.rewards.ensemble import AdaptiveReward
from unirl.rollout.engine import RolloutEngine
from unirl.rollout.native import NativeEngine
from unirl.trainer.alarms import Alarm, AlarmWatch
from unirl.trainer.algorithms import ALGORITHMS
from unirl.trainer.collect import make_experience, roll_out, samples_of
from unirl.trainer.distributed import gather_rows, reduce_metrics
from unirl.trainer.evaluate import Evaluation, evaluate_policy, evaluation_sampling
from unirl.trainer.experience import ExperienceLog, Row, evaluation_rows, experience_rows
from unirl.trainer.metrics import MetricsLog
from unirl.trainer.mismatch import effective_fraction, likely_cause, require_agreement
from unirl.trainer.preemption import Interrupted, StopAsked, StopRequest
from unirl.trainer.prompts import PromptSource
from unirl.trainer.run_directory import RunDirectory
from unirl.trainer.sample_statistics import sample_metrics
from unirl.trainer.sharding import prepare_policy, reference_on_device
from unirl.trainer.stages import FIRST_EVALUATION, RunSettings, Stage, check_stages
from unirl.trainer.state_keeper import Position, StateKeeper
from unirl.trainer.step_metrics import clock, rollout_metrics, row_metrics, tokens_per_s
from unirl.trainer.update import update_policy
from unirl.types import (
    Direction,
    Experience,
    Judge,
    Prompt,
    Reward,
    Rollout,
    Sample,
    Scores,
)

__all__ = ["Progress", "StopAsked", "Trainer"]

log = logging.getLogger("unirl.trainer")

OTHER: Mapping[Direction, Direction] = {"text": "image", "image": "text"}

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
            reward: Trained on.
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
        self.tokenizer, self.reward, self.judge = tokenizer, reward, judge
        self.evaluation_prompts, self.accelerator, self.on_step = evaluation_prompts, accelerator, on_step
        self.policy = policy
        policy.logits_chunk = settings.logits_chunk
        self.engine: RolloutEngine = engine or NativeEngine(policy, own_weights=accelerator.is_fsdp2)
        self.model, self.optimizer, self.reference = prepare_policy(
            accelerator, settings.distribution, policy
        )
        self.position = Position()
        self.kl = [self._kl_controller(stage) for stage in stages]
        self.sources = [
            self._source(prompts[stage.name], stage.direction, stage.prompts_per_step) for stage in stages
        ]
        self.replays = [self._replay(warm_up, stage) for stage in stages]
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
        state = self.keeper.resume()
        self._is_new = state is None
        if state is not None:
            self._restore(state)
        if accelerator.is_main_process:
            length = max(policy.max_response_length(s.direction, s.max_words) for s in stages)
            self.experience = ExperienceLog(run.experience, length=length)
            self.experience.restore(0 if state is None else state["experience_snapshot"])
            self.metrics = MetricsLog(
                run.path,
                last_step=-1 if state is None else self.position.step,
                num_lines=None if state is None else state["metrics_lines"],
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
                self._train()
            except Interrupted:
                why = self.keeper.save_mark()
                place = f"stopped after step {self.position.step}, state"
                if why is None:
                    raise StopAsked(f"{place} saved in {self.run_directory.checkpoints}") from None
                raise StopAsked(f"{place} not saved: {why}") from None
        for source in self._all_sources():
            source.close()
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
        metrics |= {"time/step_s": elapsed, "memory/rss_bytes": float(psutil.Process().memory_info().rss)}
        labels = {"stage": stage.name, "direction": stage.direction, "kind": "train"}
        self._log(labels, metrics)
        self.on_step(stage.name, self.position.stage_step, stage.steps, metrics)

    def _step(self, stage: Stage) -> dict[str, float]:
        """One rollout and one update phase; returns the metrics over all ranks."""
        controller = self.kl[self.position.stage]
        times: dict[str, float] = {}
        self._set_learning_rates(stage)
        with clock(times, "sync_s"):
            self.engine.sync(self.policy, self.position.step)
        with self.keeper.may_stop(), clock(times, "rollout_s"):
            rollouts, samples = self._roll_out(stage)
        with self.keeper.may_stop(), clock(times, "reward_s"):
            scores = _split(self.reward.score([s for part in samples for s in part]), samples)
        self._adapt_reward(scores)
        with (
            clock(times, "experience_s"),
            reference_on_device(self.accelerator, self.settings.distribution, self.reference),
        ):
            experiences, outputs = make_experience(
                self.accelerator,
                self.policy,
                self.reference,
                rollouts,
                scores,
                stage,
                kl_coef=controller.value,
                micro_batch_tokens=self.settings.micro_batch_tokens,
            )
            seen = self._look(stage, experiences, outputs)
        with self.keeper.may_stop():
            """A request that came meanwhile is honoured before the weights change."""
        with clock(times, "update_s"):
            replay = self.replays[self.position.stage]
            updated = update_policy(
                self.accelerator,
                self.model,
                self.optimizer,
                experiences,
                stage,
                kl_coef=controller.value,
                replay=replay.next() if replay else (),
                micro_batch_tokens=self.settings.micro_batch_tokens,
            )
        with clock(times, "log_s"):
            rows = self._remember(stage, experiences, samples)
        metrics = mean_metrics({**seen, **reduce_metrics(self.accelerator, updated)})
        if stage.importance != "none":
            metrics["importance/effective_fraction"] = effective_fraction(metrics)
        metrics |= row_metrics(rows) | sample_metrics(rows)
        metrics |= {f"time/{name}": value for name, value in times.items()}
        metrics["time/rollout_tokens_per_s"] = tokens_per_s(experiences)
        metrics["kl/coef"] = controller.value
        if stage.kl_target is not None:
            self.kl[self.position.stage] = controller.update(metrics["kl/reference"], stage.samples_per_step)
        return metrics

    def _roll_out(self, stage: Stage) -> tuple[list[Rollout], list[list[Sample]]]:
        """This rank's share of the next prompts, sampled from and turned into what a reward sees."""
        prompts = self.sources[self.position.stage].next()
        step, first = self.position.step + 1, self._first_prompt(len(prompts))
        rollouts = roll_out(
            self.engine,
            prompts,
            group_size=stage.group_size,
            length=self.policy.max_response_length(stage.direction, stage.max_words),
            sampling=stage.sampling,
            seeds=[(self.settings.seed, step, first + i) for i in range(len(prompts))],
            micro_prompts=self.settings.micro_prompts,
        )
        return rollouts, [samples_of(self.policy, self.tokenizer, rollout) for rollout in rollouts]

    def _look(
        self, stage: Stage, experiences: Sequence[Experience], outputs: Sequence[PolicyOutput]
    ) -> dict[str, Tensor]:
        """Metric sums before the update, over all ranks; refuses to train on another policy's samples."""
        parts = [rollout_metrics(*part, stage) for part in zip(experiences, outputs, strict=True)]
        seen = reduce_metrics(self.accelerator, add_metrics(parts))
        if self.position.stage_step == 0:
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
        is_last = done == stage.steps
        judge = None
        if is_last or (every and done % every == 0):
            judge = self._evaluate(stage.name)
        if is_last:
            self.position.stage, self.position.stage_step = self.position.stage + 1, 0
        self.position.is_evaluation_due = False
        self.keeper.mark()
        alarms = self._alarms_that_stop()
        if self.keeper.is_due(self.position.step) or alarms or is_last:
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

    def _evaluate(self, name: str) -> float:
        """Judge both directions on the held-out prompts; returns the mean of what the judge accepts."""
        started = time.perf_counter()
        self.engine.sync(self.policy, self.position.step)
        accuracies = []
        for direction, prompts in self.evaluation_prompts.items():
            evaluation = evaluate_policy(
                self.accelerator,
                self.policy,
                self.tokenizer,
                prompts,
                self.reward,
                self.judge,
                engine=self.engine,
                sampling=evaluation_sampling(self.stages, direction),
                seed=self.settings.seed,
                max_words=max(stage.max_words for stage in self.stages),
                may_stop=self.keeper.may_stop,
            )
            self._record_evaluation(name, direction, evaluation)
            accuracies.append(evaluation.accuracy)
        self.position.wall_s += time.perf_counter() - started
        return float(np.mean(accuracies))

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

    def _set_learning_rates(self, stage: Stage) -> None:
        factor = learning_rate_factor(
            self.position.stage_step,
            warmup_steps=stage.warmup_steps,
            total_steps=max(stage.steps, stage.warmup_steps),
        )
        critic_rate = stage.critic_learning_rate if ALGORITHMS[stage.algorithm].uses_critic else 0.0
        for group, rate in zip(self.optimizer.param_groups, (stage.learning_rate, critic_rate), strict=True):
            group["lr"] = factor * rate

    def _adapt_reward(self, scores: Sequence[Scores]) -> None:
        """Let a reward with running statistics see the step's scores of all ranks."""
        if isinstance(self.reward, AdaptiveReward):
            for part in gather_rows(self.accelerator, scores):
                self.reward.adapt(part)

    def _state(self) -> dict[str, Any]:
        """Everything but weights, optimizer and generators, as JSON values."""
        return {
            "position": asdict(self.position),
            "kl": [asdict(controller) for controller in self.kl],
            "sources": [source.state_dict() for source in self._all_sources()],
            "experience_snapshot": self.experience.snapshot_id if self.experience else None,
            "metrics_lines": self.metrics.num_lines if self.metrics else None,
            "reward": self.reward.state_dict() if isinstance(self.reward, AdaptiveReward) else {},
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.position = Position(**state["position"])
        self.kl = [AdaptiveKL(**controller) for controller in state["kl"]]
        for source, cursor in zip(self._all_sources(), state["sources"], strict=True):
            source.load_state_dict(cursor)
        if isinstance(self.reward, AdaptiveReward):
            self.reward.load_state_dict(state["reward"])

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

    def _kl_controller(self, stage: Stage) -> AdaptiveKL:
        return AdaptiveKL(value=stage.kl_coef, target=stage.kl_target or 1.0, horizon=stage.kl_horizon)

    def _replay(self, warm_up: View | None, stage: Stage) -> PromptSource | None:
        if not stage.replay_prompts:
            return None
        if warm_up is None:
            raise ConfigError(f"stage {stage.name}: replay_prompts needs the rows of the warm-up, found none")
        return self._source(warm_up, OTHER[stage.direction], stage.replay_prompts)

    def _all_sources(self) -> list[PromptSource]:
        return [*self.sources, *(replay for replay in self.replays if replay is not None)]

    def _source(self, view: View, direction: Direction, prompts_per_step: int) -> PromptSource:
        return PromptSource(
            view,
            direction,
            image_size=self.tokenizer.image_size,
            prompts_per_step=prompts_per_step,
            seed=self.settings.seed,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
        )


def _split(scores: Scores, samples: Sequence[Sequence[Sample]]) -> list[Scores]:
    """Cut the scores of all samples into one part for each micro-batch."""
    ends = np.cumsum([len(part) for part in samples])
    return [
        Scores(
            total=scores.total[end - len(part) : end],
            components={name: values[end - len(part) : end] for name, values in scores.components.items()},
        )
        for end, part in zip(ends, samples, strict=True)
    ]
