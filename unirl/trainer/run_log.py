"""What a run writes down while it goes: its metrics, its experience and its alarms."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator

from unirl.errors import CheckpointError
from unirl.policies.policy import Policy
from unirl.trainer.alarms import Alarm, AlarmSettings, AlarmWatch
from unirl.trainer.distributed import gather_rows
from unirl.trainer.evaluate import Evaluation
from unirl.trainer.experience import ExperienceLog, evaluation_rows, experience_rows
from unirl.trainer.metrics import MetricsLog
from unirl.trainer.run_directory import RunDirectory
from unirl.trainer.sample_statistics import sample_metrics
from unirl.trainer.stages import Stage
from unirl.trainer.state_keeper import Position
from unirl.trainer.step_metrics import row_metrics
from unirl.trainer.stopping import StageEnd
from unirl.trainer.trackers import named_trackers, open_trackers
from unirl.types import Direction, Experience, Sample

__all__ = ["RunLog"]

log = logging.getLogger("unirl.trainer")


class RunLog:
    """Every rank has one and calls it in the same order; the first rank's writes.

    Args:
        run: Where it is written.
        accelerator: Says which rank this is.
        position: Where the loop is; looked at with every line.
        alarms: When an alarm is raised.
        length: Longest response of any stage, tokens.
        state: What `state_dict` gave; None for a new run. What was written since is dropped.
    """

    def __init__(
        self,
        run: RunDirectory,
        accelerator: Accelerator,
        position: Position,
        *,
        alarms: AlarmSettings,
        length: int,
        state: Mapping[str, Any] | None,
    ) -> None:
        self._accelerator, self._position = accelerator, position
        self._watch = AlarmWatch(alarms)
        self.experience: ExperienceLog | None = None
        """The run's samples, on the first rank."""
        self._metrics: MetricsLog | None = None
        if not accelerator.is_main_process:
            return
        self.experience = ExperienceLog(run.experience, length=length)
        self.experience.restore(0 if state is None else state["experience_snapshot"])
        self._metrics = MetricsLog(
            run.path,
            last_step=-1 if state is None else position.step,
            num_lines=None if state is None else state["metrics_lines"],
            trackers=open_trackers(named_trackers(), run.path),
        )
        for line in self._metrics.lines():
            self._watch.see(line)

    def step(self, stage: Stage, metrics: Mapping[str, float]) -> None:
        """Write the line of a step."""
        self._write({"stage": stage.name, "direction": stage.direction, "kind": "train"}, metrics)

    def samples(
        self,
        policy: Policy,
        stage: Stage,
        experiences: Sequence[Experience],
        samples: Sequence[Sequence[Sample]],
        *,
        micro_prompts: int,
    ) -> dict[str, float]:
        """Write a step's samples, of all ranks, to the experience store; returns metrics of them.

        Args:
            policy: Gives the words of the responses.
            stage: That drew them.
            experiences: This rank's, of `micro_prompts` prompts each.
            samples: Of each of these.
            micro_prompts: Prompts of an experience.
        """
        step = self._position.step + 1
        labels: dict[str, str | int] = {"stage": stage.name, "step": step, "policy_version": step - 1}
        first = self._accelerator.process_index * micro_prompts * len(experiences)
        mine = [
            row
            for i, (experience, part) in enumerate(zip(experiences, samples, strict=True))
            for row in experience_rows(
                policy, experience, part, labels, first_prompt=first + i * micro_prompts
            )
        ]
        rows = gather_rows(self._accelerator, mine)
        if self.experience is not None:
            self.experience.write(rows, message=f"stage {stage.name}, step {step}")
        return row_metrics(rows) | sample_metrics(rows)

    def evaluation(self, name: str, direction: Direction, evaluation: Evaluation) -> None:
        """Write the line and the samples of an evaluation."""
        step = self._position.step
        labels: dict[str, str | int] = {"stage": name, "step": step, "policy_version": step}
        rows = evaluation_rows(evaluation, labels, f"{name}/{direction}")
        self._write(
            {"stage": name, "direction": direction, "kind": "eval"}, evaluation.metrics | sample_metrics(rows)
        )
        if self.experience is not None:
            self.experience.write(rows, message=f"evaluation {name}, {direction}")

    def end_of_stage(self, stage: Stage, end: StageEnd) -> None:
        """Say why a stage ended, and write it down where it was not for its number of steps."""
        log.info("stage %s ends after step %d: %s", stage.name, self._position.stage_step, end.message)
        if end.reason == "steps":
            return
        about = {"stage": stage.name, "direction": stage.direction, "kind": "end"}
        self._write({**about, "reason": end.reason, "message": end.message}, {})

    def unsaved(self, stage: Stage, error: CheckpointError) -> None:
        """Raise the alarm that a checkpoint could not be written and training goes on."""
        self._raise_alarm(
            Alarm(
                name="checkpoint",
                stage=stage.name,
                direction=stage.direction,
                step=self._position.step,
                message=f"a checkpoint could not be written, training goes on: {error}",
            )
        )

    def alarms_of_step(self) -> list[str]:
        """What the alarms of the step just done say, on every rank."""
        raised = [alarm.message for alarm in self._watch.raised if alarm.step == self._position.step]
        return list(gather_rows(self._accelerator, raised))

    def sync(self) -> None:
        """See what is written to the disk."""
        if self._metrics is not None:
            self._metrics.sync()

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "experience_snapshot": self.experience.snapshot_id if self.experience else None,
            "metrics_lines": self._metrics.num_lines if self._metrics else None,
        }

    def close(self) -> None:
        """Close every output."""
        if self._metrics is not None:
            self._metrics.close()

    def _write(self, labels: Mapping[str, str], values: Mapping[str, float]) -> None:
        if self._metrics is None:
            return
        line = self._metrics.write(self._position.step, {**labels, **self._place()}, values)
        for alarm in self._watch.see(line):
            self._raise_alarm(alarm)

    def _raise_alarm(self, alarm: Alarm) -> None:
        log.warning("alarm %s, stage %s: %s", alarm.name, alarm.stage, alarm.message)
        if self._metrics is not None:
            about = {"stage": alarm.stage, "direction": alarm.direction, "kind": "alarm"}
            words = {"alarm": alarm.name, "message": alarm.message}
            self._metrics.write(self._position.step, {**about, **words, **self._place()}, alarm.evidence)

    def _place(self) -> dict[str, float]:
        return {"stage_step": self._position.stage_step, "wall_s": round(self._position.wall_s, 3)}
