"""When the state of a run is saved, where to, and how a run is picked up again."""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

from unirl.errors import CheckpointError, ConfigError
from unirl.trainer.checkpoint import (
    load_checkpoint,
    newest_checkpoint,
    rank_file,
    read_record,
    read_records,
)
from unirl.trainer.checkpoint_folder import remove_leftovers
from unirl.trainer.checkpoint_saver import CheckpointSaver
from unirl.trainer.distributed import gather_rows
from unirl.trainer.evaluate import Quality
from unirl.trainer.in_flight import InFlight, ScoredStep
from unirl.trainer.preemption import Interrupted, StopRequest
from unirl.trainer.rng_state import derive_rng_state, read_rng_state, restore_rng_state
from unirl.trainer.stages import RunSettings

__all__ = ["LOCAL_FOLDER", "Position", "StateKeeper"]

log = logging.getLogger("unirl.trainer")

LOCAL_FOLDER = "UNIRL_LOCAL_CHECKPOINTS"
"""Environment variable: a folder on a fast disk of this machine that checkpoints are written to first."""


@dataclass(slots=True, kw_only=True)
class Position:
    """Where the loop is. Saved with every checkpoint."""

    step: int = 0
    """Steps done, over all stages. Also the version of the policy's weights."""
    stage: int = 0
    """Index of the stage that the next step belongs to."""
    stage_step: int = 0
    """Steps done in that stage."""
    wall_s: float = 0.0
    """Seconds spent in the loop, over all starts."""
    reference_step: int = 0
    """Steps that were done when the reference was the policy; 0 is the policy that the run began with."""
    is_evaluation_due: bool = False
    """The step is done, and what comes after it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """What belongs to the weights as they are."""

    state: dict[str, Any]
    rng: dict[str, Any]


class StateKeeper:
    """Saves and restores what a run needs to go on. Every rank has one and calls it in the same order.

    Args:
        directory: The run's `checkpoints/`.
        settings: How often and how many.
        model: The policy with its critic, sharded or not.
        optimizer: Its optimizer.
        accelerator: Says which rank this is.
        stop: Request to stop that is looked at.
        state: Everything else that the loop knows, as JSON values.
        on_error: Called where a checkpoint could not be written and training goes on.
    """

    def __init__(
        self,
        directory: Path,
        settings: RunSettings,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        accelerator: Accelerator,
        stop: StopRequest,
        state: Callable[[], dict[str, Any]],
        on_error: Callable[[CheckpointError], None],
    ) -> None:
        self.directory, self._settings = directory, settings
        self._model, self._optimizer, self._accelerator = model, optimizer, accelerator
        self._stop, self._state, self._on_error = stop, state, on_error
        self._directories = self._places()
        self._saver = CheckpointSaver(
            self._directories,
            keep=settings.keep_checkpoints,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
        )
        self._in_flight = InFlight(
            directory / "in-flight",
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            gather=lambda steps: gather_rows(accelerator, steps),
        )
        self._mark: _Mark | None = None
        self._saved_at = time.monotonic()
        self._saved_reference = 0
        self._is_told = False
        self._rng: Callable[[], None] = lambda: None
        # A rank that left a collective of the sharded model would keep the others waiting in it.
        self._may_interrupt = not any(isinstance(p, DTensor) for p in model.parameters())

    @property
    def accelerator(self) -> Accelerator:
        """Says which rank this is."""
        return self._accelerator

    def resume(self) -> dict[str, Any] | None:
        """Load the newest whole checkpoint; return the state that was saved with it, None for a new run.

        Raises:
            CheckpointError: If there are checkpoints but none can be used.
        """
        found: list[str] = []
        if self._accelerator.is_main_process:
            for directory in self._directories:
                remove_leftovers(directory)
            newest = newest_checkpoint(*self._directories)
            found = [] if newest is None else [str(newest)]
        found = gather_rows(self._accelerator, found)
        if not found:
            return None
        path = Path(found[0])
        state = load_checkpoint(path, model=self._model, optimizer=self._optimizer)
        if self.accelerator.scaler is not None and state["loss_scale"] is not None:
            self.accelerator.scaler.load_state_dict(state["loss_scale"])
        self._saver.saved_step = self._saver.whole_step = state["position"]["step"]
        self._rng = lambda: self._restore_rng(path, state["position"]["step"])
        log.warning("resuming from %s, after step %d", path, state["position"]["step"])
        return state

    def start(self) -> None:
        """Set the global generators to what they were, right before training goes on."""
        self._rng()

    def mark(self) -> None:
        """Note what belongs to the weights as they are, for a stop before they change."""
        self._mark = _Mark(state=json.loads(json.dumps(self._full_state())), rng=read_rng_state())

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be saved after this step, on all ranks alike."""
        every, every_s = self._settings.checkpoint_every, self._settings.checkpoint_every_s
        if step % every == 0 or not every_s:
            return step % every == 0
        return any(gather_rows(self._accelerator, [time.monotonic() - self._saved_at >= every_s]))

    def save(self, *, step: int, quality: Quality | None = None) -> None:
        """Begin to save the state as it is now. `quality` is what evaluations of this policy said."""
        self.finish()
        state, quality = self._full_state(), quality or Quality()
        if quality.judge is None and quality.reward is not None and not self._is_told:
            self._is_told = True
            log.warning("no direction has a judge that could tell: best is the checkpoint of most reward")
        self._saver.save(
            step=step,
            model=self._model,
            optimizer=self._optimizer,
            state=state,
            judge=quality.judge,
            reward=quality.reward,
        )
        self._saved_reference = state["position"].get("reference_step", 0)
        self._saved_at = time.monotonic()

    def named_references(self) -> set[int]:
        """Steps whose reference a checkpoint names, of those on disk, the one on its way and the mark."""
        states = [record["state"] for record in read_records(*self._directories).values()]
        states += [] if self._mark is None else [self._mark.state]
        named = {state["position"].get("reference_step", 0) for state in states}
        return named | {self._saved_reference}

    def save_mark(self) -> str | None:
        """Save what was marked, with the weights that have not changed since, and wait until it is whole.

        Returns:
            Why it could not be saved, None where it was.
        """
        mark = self._mark
        if mark is None:
            return "nothing was done yet"
        try:
            self._saver.finish()
            step = mark.state["position"]["step"]
            if step != self._saver.saved_step or mark.state["position"]["is_evaluation_due"]:
                self._saver.save(
                    step=step, model=self._model, optimizer=self._optimizer, state=mark.state, rng=mark.rng
                )
                self._saver.finish()
        except CheckpointError as error:
            return str(error)
        return None

    def scored(self, step: int) -> ScoredStep | None:
        """This rank's samples of a step, if it was rolled out and scored before a stop."""
        return self._in_flight.load(step, self._accelerator.device)

    def keep_scored(self, step: int, scored: ScoredStep) -> None:
        """Write a step's samples, so that a stop before the weights have learnt from them loses none."""
        self._tell(partial(self._in_flight.save, step, scored, whole_step=self._saver.whole_step))

    def look(self) -> None:
        """Tell of a checkpoint that could not be written; never waits."""
        self._tell(self._saver.poll)

    def finish(self) -> None:
        """Wait until the last checkpoint is whole, and tell if it is not."""
        self._tell(self._saver.finish)

    def close(self) -> None:
        """End the threads that write, after what they are writing."""
        self._in_flight.close()
        self._saver.close()

    @contextmanager
    def may_stop(self) -> Iterator[None]:
        """A block before which the weights were marked and in which they do not change.

        Ranks agree at its end whether to stop. Unless the model is sharded, the block itself is left at once.

        Raises:
            Interrupted: On all ranks, if one was asked to stop.
        """
        try:
            if self._may_interrupt:
                with self._stop.interruptible():
                    yield
            else:
                yield
        except Interrupted:
            log.warning("asked to stop, what can be done again is left")
        if self.is_stop_asked():
            raise Interrupted

    def before_update(self) -> None:
        """Called right before the weights change: the last place to stop, and the copies must be done.

        Raises:
            Interrupted: On all ranks, if one was asked to stop.
        """
        if self.is_stop_asked():
            raise Interrupted
        self.wait_for_copy()

    def wait_for_copy(self) -> None:
        """Called before weights or optimizer change outside an update."""
        self._saver.wait_for_copy()

    def is_stop_asked(self) -> bool:
        """Whether any rank was asked to stop."""
        return any(gather_rows(self._accelerator, [self._stop.is_made]))

    def _full_state(self) -> dict[str, Any]:
        """What the loop knows, and the scale of fp16 losses."""
        scaler = self.accelerator.scaler
        return {**self._state(), "loss_scale": None if scaler is None else scaler.state_dict()}

    def _tell(self, wait: Callable[[], None]) -> None:
        try:
            wait()
        except CheckpointError as error:
            self._on_error(error)

    def _places(self) -> list[Path]:
        """The local folder, if there is one, and the run's. The local one has a part for each run."""
        local = os.environ.get(LOCAL_FOLDER)
        if not local:
            return [self.directory]
        accelerator = self._accelerator
        if int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes)) != accelerator.num_processes:
            raise ConfigError(
                f"{LOCAL_FOLDER}={local}: every rank has to see that folder, and this run is on several "
                "machines; unset it"
            )
        name = self.directory / "local-name"
        if accelerator.is_main_process and not (name.exists() and name.read_text()):
            self.directory.mkdir(parents=True, exist_ok=True)
            partial = name.with_suffix(".partial")
            partial.write_text(uuid.uuid4().hex)
            partial.rename(name)
        accelerator.wait_for_everyone()
        return [Path(local) / name.read_text(), self.directory]

    def _restore_rng(self, path: Path, step: int) -> None:
        rank, world_size = self._accelerator.process_index, self._accelerator.num_processes
        record = read_record(path, has_files=False)
        if record["world_size"] == world_size:
            restore_rng_state(json.loads((path / rank_file(rank)).read_text())["rng"])
            return
        log.warning(
            "saved on %d ranks and resumed on %d: the global generators of torch, numpy and python, which "
            "rewards of your own may draw from, are seeded anew from seed, step and rank",
            record["world_size"],
            world_size,
        )
        derive_rng_state((self._settings.seed, step, rank))
