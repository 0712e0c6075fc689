"""The whole state of a run, written so that a kill at any instant leaves a complete checkpoint behind.

A checkpoint is a directory `checkpoints/step-00000042`: `policy.safetensors` (policy and critic),
`optimizer.safetensors`, and `state.json` (everything else, and the size and checksum of the two). It is
written under another name, synced, and renamed; `state.json` comes last.
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
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unirl.errors import CheckpointError

__all__ = ["load_checkpoint", "newest_checkpoint", "save_checkpoint"]

log = logging.getLogger("unirl.trainer.checkpoint")

FORMAT = 1
POLICY, OPTIMIZER, STATE = "policy.safetensors", "optimizer.safetensors", "state.json"
NAME = re.compile(r"step-(\d{8})")


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write one checkpoint and drop all but the newest `keep`.

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
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, staging / POLICY)
    save_file(_optimizer_tensors(model, optimizer), staging / OPTIMIZER)
    files = {name: _fingerprint(staging / name) for name in (POLICY, OPTIMIZER)}
    record = {"format": FORMAT, "step": step, "files": files, "state": dict(state)}
    (staging / STATE).write_text(json.dumps(record, indent=1) + "\n")
    for name in (POLICY, OPTIMIZER, STATE):
        _sync(staging / name)
    _sync(staging)
    shutil.rmtree(final, ignore_errors=True)
    staging.rename(final)
    _sync(directory)
    for old in _checkpoints(directory)[:-keep]:
        shutil.rmtree(old)
    return final


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint that is whole; each damaged one that is passed over is warned about."""
    for path in reversed(_checkpoints(directory)):
        try:
            _read_state(path)
        except CheckpointError as error:
            log.warning("%s; the checkpoint before it is used", error)
        else:
            return path
    return None


def load_checkpoint(path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a checkpoint's tensors into model and optimizer; return the `state` that was saved.

    Raises:
        CheckpointError: If a file is missing, cut short or changed, or belongs to another model.
    """
    state = _read_state(path)
    try:
        model.load_state_dict(load_file(path / POLICY))
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
    try:
        record = json.loads((path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {STATE} cannot be read ({error})") from error
    if record.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {record.get('format')}, this version reads {FORMAT}")
    for name, wanted in record["files"].items():
        file = path / name
        if not file.is_file() or _fingerprint(file) != wanted:
            raise CheckpointError(f"{file}: missing, cut short or changed since it was written")
    state: dict[str, Any] = record["state"]
    return state


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
