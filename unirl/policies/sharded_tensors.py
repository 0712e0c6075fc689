"""Parameters that FSDP2 has cut into one part a rank, and the whole tensors that they stand for."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from unirl.errors import ShapeError

__all__ = ["copy_whole", "is_sharded", "whole"]


def is_sharded(module: nn.Module) -> bool:
    """Whether ranks hold a part of each parameter, so that every rank must take part when one is read."""
    return isinstance(module, FSDPModule)


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of a sharded one; for that, every rank must call it, in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_whole(target: Tensor, source: Tensor) -> None:
    """Write a whole tensor into a tensor or, of a sharded one, into this rank's part. No rank waits.

    Raises:
        ShapeError: If the shapes differ.
    """
    if target.shape != source.shape:
        raise ShapeError(f"a tensor of shape {tuple(source.shape)} does not fit {tuple(target.shape)}")
    source = source.to(target.dtype)
    if isinstance(target, DTensor):
        source = source.to(target.device_mesh.device_type)
        part = distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(source)
