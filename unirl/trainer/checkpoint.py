"""The whole state of a run, written so that a kill at any instant leaves a complete checkpoint behind.

A checkpoint is a directory `checkpoints/step-00000042`: `policy.safetensors` (policy and critic),
`optimizer.safetensors`, and `state.json` (everything else, and the size and checksum of the two and of
itself). It is written under another name, synced, and renamed; `state.json` comes last.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

from unirl.errors import CheckpointError

__all__ = ["load_checkpoint", "newest_checkpoint", "save_checkpoint"]

log = logging.getLogger("unirl.trainer.checkpoint")

FORMAT = 1
POLICY, OPTIMIZER, STATE = "policy.safetensors", "optimizer.safetensors", "state.json"
NAME = re.compile(r"step-(\d{8})")


class DamagedCheckpointError(CheckpointError):
    """A checkpoint with a file that is not as it was written."""


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write one checkpoint, then drop older ones, all but `keep`, and those of later steps.

    Checkpoints of later steps are damaged ones that a resume passed over: the run went back behind them.

    Args:
        directory: The run's `checkpoints/`.
        step: Steps done; names the checkpoint.
        model: Policy with critic; parameters and persistent buffers are saved.
        optimizer: Its tensors are saved; its settings are the run's.
        state: JSON values: loop position, cursors, controllers, marks of the stores and logs.
        keep: Checkpoints that stay, at least 1.

    Returns:
        The new checkpoint's directory.
    """
    final = directory / f"step-{step:08d}"
    staging = directory / f".{final.name}.partial"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    save_model(model, str(staging / POLICY))
    save_file(_optimizer_tensors(model, optimizer), staging / OPTIMIZER)
    files = {name: _fingerprint(staging / name) for name in (POLICY, OPTIMIZER)}
    record = {"format": FORMAT, "step": step, "files": files, "state": dict(state)}
    (staging / STATE).write_text(json.dumps({**record, "xxh3_128": _digest(record)}, indent=1) + "\n")
    for name in (POLICY, OPTIMIZER, STATE):
        _sync(staging / name)
    _sync(staging)
    shutil.rmtree(final, ignore_errors=True)
    staging.rename(final)
    _sync(directory)
    _clean(directory, newest=final, keep=keep)
    return final


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint that is whole; each damaged one that is passed over is warned about.

    Raises:
        CheckpointError: If there are checkpoints but none is whole, or the newest is of another format. A
            run is never started over what is left of it.
    """
    found = _checkpoints(directory)
    for path in reversed(found):
        try:
            _read_state(path)
        except DamagedCheckpointError as error:
            log.warning("%s; the checkpoint before it is used", error)
        else:
            return path
    if found:
        raise CheckpointError(
            f"{directory}: none of its {len(found)} checkpoints is whole; "
            "put a whole one there, or move the run's folder away to start again"
        )
    return None


def load_checkpoint(path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a checkpoint's tensors into model and optimizer; return the `state` that was saved.

    Raises:
        CheckpointError: If a file is missing, cut short or changed, or belongs to another model.
    """
    state = _read_state(path)
    try:
        load_model(model, str(path / POLICY))
        tensors = load_file(path / OPTIMIZER)
    except (RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: does not fit this policy: {error}") from error
    for name, parameter in model.named_parameters():
        fields = {key.split(":", 1)[1]: value for key, value in tensors.items() if key.startswith(f"{name}:")}
        if fields:
            optimizer.state[parameter] = fields
    return state


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}:{field}": value.contiguous()
        for name, parameter in model.named_parameters()
        for field, value in optimizer.state.get(parameter, {}).items()
    }


def _read_state(path: Path) -> dict[str, Any]:
    """What `save_checkpoint` was given, once all files of the checkpoint are as they were written."""
    try:
        record = json.loads((path / STATE).read_text())
        if record["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {record['format']}, this version reads {FORMAT}")
        is_same = record.pop("xxh3_128") == _digest(record)
        files: dict[str, Any] = record["files"]
        state: dict[str, Any] = record["state"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{path}: {STATE} cannot be read ({error!r})") from error
    if not is_same:
        raise DamagedCheckpointError(f"{path / STATE}: changed since it was written")
    for name, wanted in files.items():
        file = path / name
        if not file.is_file() or _fingerprint(file) != wanted:
            raise DamagedCheckpointError(f"{file}: missing, cut short or changed since it was written")
    return state


def _digest(record: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _clean(directory: Path, *, newest: Path, keep: int) -> None:
    whole = _checkpoints(directory)
    position = whole.index(newest) + 1
    abandoned = whole[: max(position - keep, 0)] + whole[position:]
    for path in (*abandoned, *directory.glob(".step-*.partial")):
        shutil.rmtree(path)


def _fingerprint(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        digest = xxhash.xxh3_128()
        while block := file.read(1 << 22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def _checkpoints(directory: Path) -> list[Path]:
    found = [p for p in directory.glob("step-*") if NAME.fullmatch(p.name)] if directory.is_dir() else []
    return sorted(found)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
