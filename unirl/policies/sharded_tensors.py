"""Parameters that FSDP2 has cut into one part a rank, and the whole tensors that they stand for."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

__all__ = ["is_sharded", "whole"]


def is_sharded(module: nn.Module) -> bool:
    """Whether ranks hold a part of each parameter, so that every rank must take part when one is read."""
    return isinstance(module, FSDPModule)


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of a sharded one; for that, every rank must call it, in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
