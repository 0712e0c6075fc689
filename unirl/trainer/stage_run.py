"""What one stage keeps from step to step. All of it is saved with a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator

from storage import View
from unirl.errors import ConfigError
from unirl.policies.policy import Policy
from unirl.trainer.coefficients import Coefficients
from unirl.trainer.curriculum import Curriculum, outside_window
from unirl.trainer.distributed import gather_rows
from unirl.trainer.experience import ExperienceLog
from unirl.trainer.prompts import PromptSource
from unirl.trainer.reference_refresh import copy_into
from unirl.trainer.stages import RunSettings, Stage
from unirl.trainer.stopping import Stopping
from unirl.types import Direction, Prompt

__all__ = ["StageRun", "open_stages", "start_anew"]

OTHER: Mapping[Direction, Direction] = {"text": "image", "image": "text"}


class StageRun:
    """A stage on its way: where its prompts are, and what its weights have come to."""

    def __init__(
        self, stage: Stage, prompts: Curriculum, *, replay: PromptSource | None, micro_prompts: int
    ) -> None:
        """Start a stage.

        Args:
            stage: Its settings.
            prompts: Where its prompts come from.
            replay: Captioned pictures that each step also learns from, or None.
            micro_prompts: Prompts that are asked for one modality before the next, where there are two.
        """
        self.stage = stage
        self.coefficients = Coefficients(stage)
        self.stopping = Stopping(stage)
        self.curriculum = prompts
        self._replay, self._micro_prompts = replay, micro_prompts

    def next_prompts(self, stage_step: int) -> list[Prompt]:
        """This rank's prompts of a step, counted from 0, each with what it is to be answered with."""
        directions, size = self.stage.directions, self._micro_prompts
        return [
            replace(prompt, direction=directions[i // size % len(directions)])
            for i, prompt in enumerate(self.curriculum.next(stage_step))
        ]

    def choose_prompts(
        self, accelerator: Accelerator, experience: ExperienceLog | None, *, step: int, stage_step: int
    ) -> None:
        """Let prompts rest that the stage's samples show to be solved or out of reach.

        Args:
            accelerator: Tells what the rank with the experience finds to all.
            experience: Of the run, on one rank.
            step: Steps done.
            stage_step: Of which in this stage.
        """
        if not self.curriculum.is_choice_due(stage_step):
            return
        since = step - min(self.stage.success_steps, stage_step)
        found: list[str] = []
        if experience is not None:
            rates = experience.success_rates(self.stage.name, since_step=since, column=self.stage.success_of)
            found = outside_window(rates, self.stage)
        self.curriculum.leave_out(gather_rows(accelerator, found))

    def next_replay(self) -> list[Prompt]:
        """This rank's captioned pictures of the next step; none if the stage replays nothing."""
        return [] if self._replay is None else self._replay.next()

    def is_critic_only(self, stage_step: int) -> bool:
        """Whether the critic alone learns in a step, counted from 0."""
        return stage_step < self.stage.critic_warmup_steps

    def metrics(self, now: Stage) -> dict[str, float]:
        """Of a step trained with the weights of `now`: these, and the share of prompts that is drawn."""
        found = self.coefficients.metrics(now)
        if self.stage.success_window is not None:
            found["curriculum/kept_fraction"] = self.curriculum.kept_fraction
        return found

    def state_dict(self) -> dict[str, Any]:
        """JSON values; they hold at any number of ranks."""
        return {
            "coefficients": self.coefficients.state_dict(),
            "stopping": self.stopping.state_dict(),
            "prompts": self.curriculum.state_dict(),
            "replay": None if self._replay is None else self._replay.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.coefficients.load_state_dict(state["coefficients"])
        self.stopping.load_state_dict(state["stopping"])
        self.curriculum.load_state_dict(state["prompts"])
        if self._replay is not None:
            self._replay.load_state_dict(state["replay"])

    def close(self) -> None:
        """Stop the threads that read ahead."""
        self.curriculum.close()
        if self._replay is not None:
            self._replay.close()


def open_stages(
    stages: Sequence[Stage],
    settings: RunSettings,
    prompts: Mapping[str, View],
    warm_up: View | None,
    *,
    image_size: int,
    accelerator: Accelerator,
) -> list[StageRun]:
    """Every stage at its start.

    Args:
        stages: Of the run.
        settings: Of the run.
        prompts: Rows that each stage begins with, by the stage's name.
        warm_up: Rows that the policy was warmed up on, for replay.
        image_size: Side of the pictures.
        accelerator: Says which share of the prompts this rank takes.

    Raises:
        ConfigError: If a stage replays and there is no warm-up, or a lesson has too few prompts.
    """

    def source(view: View, direction: Direction, prompts_per_step: int, seed: int) -> PromptSource:
        return PromptSource(
            view,
            direction,
            image_size=image_size,
            prompts_per_step=prompts_per_step,
            seed=seed,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
        )

    def open_stage(stage: Stage) -> StageRun:
        def own(view: View, seed: int) -> PromptSource:
            return source(view, stage.directions[0], stage.prompts_per_step, seed)

        replay = None
        if stage.replay_prompts and warm_up is None:
            raise ConfigError(f"stage {stage.name}: replay_prompts needs the rows of the warm-up, found none")
        if stage.replay_prompts and warm_up is not None and stage.direction != "both":
            replay = source(warm_up, OTHER[stage.direction], stage.replay_prompts, settings.seed)
        return StageRun(
            stage,
            Curriculum(stage, prompts[stage.name], own, seed=settings.seed),
            replay=replay,
            micro_prompts=settings.micro_prompts,
        )

    return [open_stage(stage) for stage in stages]


@torch.no_grad()
def start_anew(policy: Policy, optimizer: torch.optim.Optimizer, stage: Stage) -> None:
    """Forget what the stage does not carry over: the optimizer's moments, the critic and its moments."""
    if "optimizer" not in stage.carry:
        optimizer.state.clear()
    if "critic" not in stage.carry:
        fresh = dict(policy.critic.fresh(policy.trunk))
        for name, parameter in policy.critic.named_parameters():
            copy_into(parameter, fresh[name])
            optimizer.state.pop(parameter, None)
