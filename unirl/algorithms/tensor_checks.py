"""The checks that every algorithm makes at its door: rank, shape, dtype of the tensors that came in."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unirl.errors import ConfigError, ShapeError

__all__ = ["as_float", "require_denominator", "require_mask", "require_rank", "require_same_shape"]


def require_rank(rank: int, **tensors: Tensor) -> None:
    """Refuse any of `tensors` that does not have `rank` axes.

    Raises:
        ShapeError: With the argument's name, its shape and the wanted rank.
    """
    for name, tensor in tensors.items():
        if tensor.ndim != rank:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; it needs {rank} axes")


def require_same_shape(**tensors: Tensor) -> None:
    """Refuse `tensors` of unlike shapes; nothing is broadcast silently.

    Raises:
        ShapeError: With both names and both shapes.
    """
    (first_name, first), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.shape != first.shape:
            raise ShapeError(
                f"{first_name} has shape {tuple(first.shape)}, {name} has {tuple(tensor.shape)}; "
                "they need the same shape"
            )


def require_mask(**masks: Tensor) -> None:
    """Refuse masks that are not bool: a float mask would scale instead of select.

    Raises:
        ShapeError: With the argument's name and its dtype.
    """
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise ShapeError(f"{name} has dtype {mask.dtype}; it needs torch.bool, pass {name}.bool()")


def require_denominator(denominator: float | Tensor) -> None:
    """Refuse a denominator that is not above 0. A tensor is trusted: to look would wait for the device.

    Raises:
        ConfigError: With the number.
    """
    if not isinstance(denominator, Tensor) and not (math.isfinite(denominator) and denominator > 0):
        raise ConfigError(
            f"denominator is {denominator}; it needs a number above 0, usually the valid tokens of the update"
        )


def as_float(tensor: Tensor) -> Tensor:
    """Return `tensor` in the precision that algorithms compute in: float64 stays, all else is float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
