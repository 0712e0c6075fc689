"""How losses report what they saw, so that micro-batches and ranks can be added up.

A loss returns 0-d tensors by name. The ending of a name says how to combine two parts:

    <prefix>/tokens       number of valid tokens          add
    <prefix>/<name>_sum   sum over valid tokens           add
    <prefix>/<name>_max   largest over valid tokens       take the larger (-inf if there is none)
    <prefix>/<name>_min   smallest over valid tokens      take the smaller (+inf if there is none)
    <prefix>/<name>_tokens  tokens that <name> was summed over, where they are not all    add

`add_metrics` combines parts; `mean_metrics` turns `<prefix>/<name>_sum` into `<prefix>/<name>`, the mean over
the `<prefix>/tokens` valid tokens, or over its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unirl.algorithms.masking import masked_sum

__all__ = ["add_metrics", "mean_metrics", "token_metrics"]


def token_metrics(
    prefix: str,
    mask_BT: Tensor,
    *,
    sums: Mapping[str, Tensor],
    extremes: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Reduce per-token values to the metrics above.

    Args:
        prefix: First part of each name, for example "policy".
        mask_BT: Bool (B, T).
        sums: (B, T) each, by name; each gives `<prefix>/<name>_sum`.
        extremes: (B, T) each, by name; each gives `<prefix>/<name>_max` and `<prefix>/<name>_min`.

    Returns:
        0-d float32 tensors (float64 for float64 values), no gradient.
    """
    metrics = {f"{prefix}/tokens": mask_BT.sum().double()}
    for name, values in sums.items():
        metrics[f"{prefix}/{name}_sum"] = masked_sum(values.detach().double(), mask_BT)
    for name, values in (extremes or {}).items():
        flat = values.detach().double().flatten()
        valid = mask_BT.flatten()
        metrics[f"{prefix}/{name}_max"] = _largest(torch.where(valid, flat, -math.inf))
        metrics[f"{prefix}/{name}_min"] = -_largest(torch.where(valid, -flat, -math.inf))
    return metrics


def add_metrics(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Combine the metrics of several micro-batches or ranks. A name may be missing from some parts."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = value if name not in total else _combine(name, total[name], value)
    return total


def mean_metrics(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Turn combined metrics into the numbers that are logged.

    Returns:
        `<prefix>/<name>` for each `_sum`, the mean over valid tokens, NaN if there were none; `_max`, `_min`
        and `tokens` as they are; no `_tokens`.

    Example: `{"policy/tokens": 4, "policy/clip_fraction_sum": 1}` gives `{"policy/tokens": 4.0,
    "policy/clip_fraction": 0.25}`.
    """
    logged: dict[str, float] = {}
    for name, value in sums.items():
        if name.endswith("_tokens"):
            continue
        if name.endswith("_sum"):
            own = f"{name.removesuffix('_sum')}_tokens"
            tokens = float(sums[own if own in sums else f"{name.rsplit('/', 1)[0]}/tokens"])
            logged[name.removesuffix("_sum")] = float(value) / tokens if tokens else math.nan
        else:
            logged[name] = float(value)
    return logged


def _combine(name: str, left: Tensor, right: Tensor) -> Tensor:
    if name.endswith("_max"):
        return torch.maximum(left, right)
    if name.endswith("_min"):
        return torch.minimum(left, right)
    return left + right


def _largest(values: Tensor) -> Tensor:
    return values.amax() if values.numel() else values.new_tensor(-math.inf)
