"""What a checkpoint is on disk, and which one a run goes on from.

A checkpoint is a directory `checkpoints/step-00000042`: safetensors files of policy (with critic) and
optimizer, one of each or one of each for every rank that holds a part; `rank-00000.json` with each rank's
global generators; and `state.json` with everything else and the size and checksum of every file. It is
written under another name and renamed when all of it is on the disk. What nothing trains, such as the model
below LoRA adapters, lies once in `checkpoints/frozen`, in files that are called what their content's checksum
is; every checkpoint names those that belong to it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unirl.errors import CheckpointError
from unirl.trainer.host_copy import Fingerprint
from unirl.trainer.tensor_pieces import PieceReader, model_tensors, piece_of

__all__ = [
    "FORMAT",
    "FROZEN",
    "OPTIMIZER",
    "POLICY",
    "STATE",
    "DamagedCheckpointError",
    "checkpoints_in",
    "digest",
    "fingerprint",
    "load_checkpoint",
    "load_policy_weights",
    "newest_checkpoint",
    "rank_file",
    "read_record",
    "read_records",
    "step_of",
]

log = logging.getLogger("unirl.trainer.checkpoint")

FORMAT = 3
READABLE = (2, FORMAT)
"""Format 2 had frozen parameters among the others."""
POLICY, OPTIMIZER, STATE = "policy", "optimizer", "state.json"
FROZEN = "frozen"
"""Folder beside the checkpoints, and what `state.json` calls the files in it."""
NAME = re.compile(r"step-(\d{8})")


class DamagedCheckpointError(CheckpointError):
    """A checkpoint with a file that is not as it was written."""


def newest_checkpoint(*directories: Path) -> Path | None:
    """The newest checkpoint that is whole; each damaged one that is passed over is warned about.

    Args:
        directories: Where to look; of two that are as new, the one in the earlier directory is taken.

    Raises:
        CheckpointError: If there are checkpoints but none is whole, or the newest is of another format. A
            run is never started over what is left of it.
    """
    found = [path for directory in directories for path in checkpoints_in(directory)]
    for path in sorted(found, key=step_of, reverse=True):
        try:
            read_record(path)
        except DamagedCheckpointError as error:
            log.warning("%s; the checkpoint before it is used", error)
        else:
            return path
    if found:
        raise CheckpointError(
            f"{' and '.join(map(str, directories))}: none of its {len(found)} checkpoints is whole; "
            "put a whole one there, or move the run's folder away to start again"
        )
    return None


def load_checkpoint(path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put this rank's part of a checkpoint into model and optimizer; return the `state` that was saved.

    The number of ranks and how tensors are cut over them may be other than when it was saved.

    Raises:
        CheckpointError: If a file is missing, cut short or changed, or belongs to another model.
    """
    record = read_record(path)
    tensors = _fill_policy(path, record, model)
    try:
        with PieceReader(_files(path, OPTIMIZER, record)) as reader:
            _fill_optimizer(reader, tensors, optimizer)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: does not fit this policy: {error}") from error
    state: dict[str, Any] = record["state"]
    return state


def load_policy_weights(path: Path, *, model: nn.Module) -> dict[str, Any]:
    """Put this rank's part of policy and critic into a model; return the `state` that was saved.

    Raises:
        CheckpointError: If a file is missing, cut short or changed, or belongs to another model.
    """
    record = read_record(path)
    _fill_policy(path, record, model)
    state: dict[str, Any] = record["state"]
    return state


def read_record(path: Path, *, has_files: bool = True) -> dict[str, Any]:
    """What `state.json` says.

    Args:
        path: The checkpoint.
        has_files: Whether to read all of its files, to see that they are as they were written.

    Raises:
        DamagedCheckpointError: If something is missing, cut short or changed.
        CheckpointError: If it is of another format.
    """
    try:
        record: dict[str, Any] = json.loads((path / STATE).read_text())
        if record["format"] not in READABLE:
            raise CheckpointError(
                f"{path}: format {record['format']}, this version reads formats {READABLE[0]} and {FORMAT}"
            )
        is_same = record.pop("xxh3_128") == digest(record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{path}: {STATE} cannot be read ({error!r})") from error
    if not is_same:
        raise DamagedCheckpointError(f"{path / STATE}: changed since it was written")
    files = {path / name: wanted for name, wanted in record["files"].items()}
    files |= {path.parent / FROZEN / name: wanted for name, wanted in record.get(FROZEN, {}).items()}
    for file, wanted in files.items() if has_files else ():
        if not file.is_file() or fingerprint(file) != wanted:
            raise DamagedCheckpointError(f"{file}: missing, cut short or changed since it was written")
    return record


def read_records(*directories: Path) -> dict[Path, dict[str, Any]]:
    """What the `state.json` of every checkpoint says, where it can be read; the files are not looked at."""
    found = {}
    for path in (path for directory in directories for path in checkpoints_in(directory)):
        with suppress(CheckpointError):
            found[path] = read_record(path, has_files=False)
    return found


def step_of(path: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(path.name.removeprefix("step-"))


def rank_file(rank: int) -> str:
    """Name of the file that a rank writes last."""
    return f"rank-{rank:05d}.json"


def digest(record: Mapping[str, Any]) -> str:
    """Checksum of JSON values."""
    return xxhash.xxh3_128(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _files(path: Path, kind: str, record: Mapping[str, Any]) -> list[Path]:
    """The files of one kind, whatever they are called on the ranks."""
    return [path / name for name in sorted(record["files"]) if name.startswith(f"{kind}.")]


def _fill_policy(path: Path, record: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Fill the model's tensors; returns them by name."""
    tensors = dict(model_tensors(model))
    try:
        frozen = [path.parent / FROZEN / name for name in sorted(record.get(FROZEN, {}))]
        with PieceReader([*_files(path, POLICY, record), *frozen]) as reader:
            unknown = reader.shapes.keys() - tensors.keys()
            if unknown:
                raise CheckpointError(f"{min(unknown)} is not known here")
            for name, tensor in tensors.items():
                reader.fill(name, piece_of(tensor, is_main=True))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: does not fit this policy: {error}") from error
    return tensors


def _fill_optimizer(
    reader: PieceReader, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> None:
    for key, shape in reader.shapes.items():
        name, field = key.split(":", 1)
        if name not in tensors:
            raise CheckpointError(f"{name} is not known here")
        parameter = tensors[name]
        value: Tensor
        if shape == tuple(parameter.shape) and isinstance(parameter, DTensor):
            value = torch.zeros_like(parameter)
        else:
            value = torch.zeros(shape, device=parameter.device if shape else "cpu")
        value = value.to(reader.dtypes[key])
        reader.fill(key, piece_of(value, is_main=True))
        optimizer.state[parameter][field] = value


def fingerprint(path: Path) -> Fingerprint:
    """Read a file for its size and checksum."""
    with path.open("rb") as file:
        checksum = xxhash.xxh3_128()
        while block := file.read(1 << 22):
            checksum.update(block)
    return {"bytes": path.stat().st_size, "xxh3_128": checksum.hexdigest()}


def checkpoints_in(directory: Path) -> list[Path]:
    """The checkpoints of a folder, whole or not, by their steps."""
    found = [p for p in directory.glob("step-*") if NAME.fullmatch(p.name)] if directory.is_dir() else []
    return sorted(found)
