"""Token lists of unequal length as one tensor, and where each token stands in its own row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["left_pad", "token_positions"]


def left_pad(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Stack token lists, padded on the left; return int64 (B, L) ids and bool (B, L) mask."""
    length = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (length - len(row)) + list(row) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(length) >= (length - lengths)[:, None]


def token_positions(mask: Tensor) -> Tensor:
    """Number of each token in its row, int64 (B, T), for a bool (B, T); left padding has the first's."""
    return (mask.long().cumsum(dim=1) - 1).clamp_(min=0)
