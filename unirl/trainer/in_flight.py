"""Experience in flight: what a step rolled out and scored, on disk before the weights learn from it.

It is the increment between two checkpoints. Weights after a step follow from the weights before it and from
its samples, so a run that goes on from an older checkpoint learns from the samples that it has again, and
rolls out and scores nothing twice.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from unirl.errors import CheckpointError
from unirl.trainer.checkpoint import fingerprint
from unirl.trainer.host_copy import HostCopy
from unirl.trainer.rng_state import read_rng_state, restore_rng_state
from unirl.trainer.run_directory import write_json
from unirl.types import Prompt, Rollout, Scores, TokenOrigin

__all__ = ["InFlight", "ScoredStep"]

log = logging.getLogger("unirl.trainer.in_flight")

CLASSES = {cls.__name__: cls for cls in (Prompt, Rollout, Scores, TokenOrigin)}
NAME = re.compile(r"step-(\d{8})\.(\d{5})-of-(\d{5})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredStep:
    """This rank's samples of one step."""

    rollouts: Sequence[Rollout]
    scores: Sequence[Scores]
    """One for each rollout."""
    cursor: Mapping[str, Any]
    """State of the stage behind the step's prompts."""


class InFlight:
    """The folder `checkpoints/in-flight`: for each step and rank a tensor file and then a JSON file.

    Args:
        directory: The folder.
        rank: This process.
        world_size: Number of processes; steps of another number are not used.
        gather: Gives every rank the lists of all ranks, one behind the other.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        world_size: int,
        gather: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        self._directory, self._rank, self._world_size = directory, rank, world_size
        self._copy = HostCopy()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="in flight")
        self._writing: Future[None] | None = None
        mine = [step for step, owner in self._found() if owner == (rank, world_size)]
        steps = list(gather([step for step in mine if self._is_whole(step)]))
        self._usable = {step for step in steps if steps.count(step) == world_size}

    def save(self, step: int, scored: ScoredStep, *, whole_step: int) -> None:
        """Write a step's samples in the background, and drop those that a whole checkpoint has learnt from.

        Args:
            step: The step, counted from 1.
            scored: Its samples.
            whole_step: Step of the newest whole checkpoint.

        Raises:
            CheckpointError: If the samples of the step before could not be written.
        """
        self.finish()
        tensors: dict[str, Tensor] = {}
        content = {
            "rng": read_rng_state(),
            "cursor": dict(scored.cursor),
            "rollouts": _pack(scored.rollouts, "rollouts", tensors),
            "scores": _pack(scored.scores, "scores", tensors),
        }
        self._copy.take(tensors, metadata={})
        self._writing = self._thread.submit(self._write, step, content, whole_step)

    def load(self, step: int, device: torch.device) -> ScoredStep | None:
        """The samples of a step, if every rank has its own; the global generators become what they were."""
        if step not in self._usable:
            return None
        record = json.loads(self._record(step).read_text())
        tensors = {name: tensor.to(device) for name, tensor in load_file(self._tensors(step)).items()}
        restore_rng_state(record["rng"])
        log.warning("step %d: rolled out and scored before the stop, learning goes on with that", step)
        return ScoredStep(
            rollouts=_unpack(record["rollouts"], tensors),
            scores=_unpack(record["scores"], tensors),
            cursor=record["cursor"],
        )

    def finish(self) -> None:
        """Wait until the last step is written.

        Raises:
            CheckpointError: If it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """End the thread, after what it is writing."""
        self._thread.shutdown()

    def _write(self, step: int, content: Mapping[str, Any], whole_step: int) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for found, (rank, world_size) in self._found():
                if found <= whole_step and (rank == self._rank or world_size != self._world_size):
                    for ending in ("json", "safetensors"):
                        self._name(found, rank, world_size, ending).unlink(missing_ok=True)
            self._record(step).unlink(missing_ok=True)
            wanted = self._copy.write(self._tensors(step))
            write_json(self._record(step), {**content, "file": wanted})
        except OSError as error:
            raise CheckpointError(f"the samples of step {step} could not be written: {error}") from error

    def _is_whole(self, step: int) -> bool:
        """Whether both files are as they were written."""
        try:
            wanted = json.loads(self._record(step).read_text())["file"]
            return bool(fingerprint(self._tensors(step)) == wanted)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _found(self) -> list[tuple[int, tuple[int, int]]]:
        """Step, and (rank, world size), of every JSON file."""
        if not self._directory.is_dir():
            return []
        matches = (NAME.fullmatch(path.name) for path in sorted(self._directory.iterdir()))
        return [(int(m[1]), (int(m[2]), int(m[3]))) for m in matches if m]

    def _name(self, step: int, rank: int, world_size: int, ending: str) -> Path:
        return self._directory / f"step-{step:08d}.{rank:05d}-of-{world_size:05d}.{ending}"

    def _record(self, step: int) -> Path:
        return self._name(step, self._rank, self._world_size, "json")

    def _tensors(self, step: int) -> Path:
        return self._name(step, self._rank, self._world_size, "safetensors")


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """JSON values for records of `unirl.types`; their tensors and arrays go into `tensors` by their path."""
    if isinstance(value, (Tensor, np.ndarray)):
        tensors[path] = torch.as_tensor(value)
        return {"tensor" if isinstance(value, Tensor) else "array": path}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: _pack(getattr(value, field.name), f"{path}.{field.name}", tensors)
            for field in dataclasses.fields(value)
        }
        return {"class": type(value).__name__, "fields": fields}
    if isinstance(value, Mapping):
        return {"map": {name: _pack(item, f"{path}.{name}", tensors) for name, item in value.items()}}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_pack(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
    return value


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "array" in value:
        return tensors[value["array"]].cpu().numpy()
    if "map" in value:
        return {name: _unpack(item, tensors) for name, item in value["map"].items()}
    fields = {name: _unpack(item, tensors) for name, item in value["fields"].items()}
    return CLASSES[value["class"]](**fields)
