"""A reference that is moved up to the policy now and then, and the file that a resumed run finds it in."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from unirl.errors import CheckpointError, ConfigError
from unirl.policies.adapters import has_adapters
from unirl.policies.policy import Policy
from unirl.trainer.stages import Stage

__all__ = [
    "copy_into",
    "is_refresh_due",
    "load_reference",
    "move_reference",
    "refresh_reference",
    "require_movable",
    "save_reference",
]


def is_refresh_due(stage: Stage, *, stage_step: int, is_first_stage: bool) -> bool:
    """Whether the reference becomes the policy before this step of the stage, counted from 0."""
    if stage_step == 0:
        return not is_first_stage and "reference" not in stage.carry
    return bool(stage.reference_every) and stage_step % stage.reference_every == 0


def require_movable(policy: Policy, stages: Sequence[Stage]) -> None:
    """Refuse to refresh a reference that has no weights of its own.

    Raises:
        ConfigError: With LoRA, where the reference is the policy without its adapters.
    """
    for stage in stages:
        if has_adapters(policy.lm) and (stage.reference_every or "reference" not in stage.carry):
            raise ConfigError(
                f"stage {stage.name}: with LoRA the reference is the model without its adapters and cannot "
                "move; set reference_every=0 and let carry name reference, or train all weights"
            )


@torch.no_grad()
def refresh_reference(reference: Policy, policy: Policy) -> None:
    """Copy the policy's weights into its reference, in place; either may be sharded, or on another device."""
    sources = dict(policy.lm.named_parameters())
    for name, target in reference.lm.named_parameters():
        copy_into(target, sources[name])


def move_reference(
    directory: Path,
    reference: Policy,
    policy: Policy,
    *,
    step: int,
    named: Collection[int],
    is_main: bool,
) -> None:
    """Let the policy as it is be the reference, and write it. Every rank calls it, see `save_reference`."""
    refresh_reference(reference, policy)
    save_reference(directory, reference, step=step, named=named, is_main=is_main)


def save_reference(
    directory: Path, reference: Policy, *, step: int, named: Collection[int], is_main: bool
) -> None:
    """Write the reference that stems from a step. Every rank calls it.

    Args:
        directory: Where files of references are.
        reference: Its weights.
        step: Steps done when it was the policy.
        named: Steps of the references that checkpoints name; files of others go.
        is_main: Whether this rank writes.
    """
    path = _path(directory, step)
    tensors = {
        name: _whole(parameter).detach().cpu().contiguous()
        for name, parameter in reference.lm.named_parameters()
    }
    if not is_main:
        return
    directory.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"xxh3_128": _digest(tensors)})
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.rename(path)
    needed = {path, *(_path(directory, other) for other in named)}
    for old in directory.glob("step-*.safetensors"):
        if old not in needed:
            old.unlink()


@torch.no_grad()
def load_reference(directory: Path, reference: Policy, *, step: int) -> None:
    """Put back the reference that stems from a step.

    Raises:
        CheckpointError: If its file is missing, damaged, or of another model.
    """
    path = _path(directory, step)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            wanted = (file.metadata() or {}).get("xxh3_128")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: the reference of the run cannot be read ({error}); put the file back, or go on from a "
            "checkpoint whose reference is there"
        ) from error
    parameters = dict(reference.lm.named_parameters())
    if wanted != _digest(tensors) or parameters.keys() != tensors.keys():
        raise CheckpointError(f"{path}: changed since it was written, or of another model; put the file back")
    for name, target in parameters.items():
        copy_into(target, tensors[name])


def _path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}.safetensors"


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy a tensor's values in place; either may be sharded, on another device or of another dtype."""
    whole = _whole(source).to(device=target.device, dtype=target.dtype)
    if isinstance(target, DTensor):
        whole = distribute_tensor(whole, target.device_mesh, target.placements)
    target.copy_(whole)
