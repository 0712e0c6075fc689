"""The few collectives that the loop needs. Each is a plain function and does nothing on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from unirl.algorithms import Moments, add_metrics, masked_moments_sums, moments_from_sums

__all__ = ["gather_rows", "global_count", "global_moments", "reduce_metrics"]

T = TypeVar("T")


def global_moments(accelerator: Accelerator, values: Tensor, mask: Tensor) -> Moments:
    """Count, mean and variance of (B, T) values where the mask is True, over the batches of all ranks."""
    return moments_from_sums(accelerator.reduce(masked_moments_sums(values, mask), reduction="sum"))


def global_count(accelerator: Accelerator, counts: Tensor) -> float:
    """Sum of counts, or number of True entries of a mask, over all ranks; at least 1."""
    count = accelerator.reduce(counts.sum().to(torch.float64), reduction="sum")
    return max(float(count), 1.0)


def reduce_metrics(accelerator: Accelerator, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Combine the metric sums of all ranks, as `unirl.algorithms.add_metrics` combines micro-batches."""
    parts = gather_object([{name: float(value) for name, value in metrics.items()}])
    tensors = [
        {name: torch.tensor(value, dtype=torch.float64) for name, value in part.items()} for part in parts
    ]
    return add_metrics(tensors)


def gather_rows(accelerator: Accelerator, rows: Sequence[T]) -> list[T]:
    """All ranks' rows, rank by rank, on every rank."""
    return list(gather_object(list(rows)))
