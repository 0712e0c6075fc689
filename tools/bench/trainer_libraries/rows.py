"""The common rows as tensors, and the settings that all trainers share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "BETAS",
    "CLIP",
    "GROUP",
    "LEARNING_RATE",
    "MAX_GRAD_NORM",
    "NUM_ROWS",
    "PROMPT_LENGTH",
    "Rows",
    "read_rows",
]

NUM_ROWS, GROUP, PROMPT_LENGTH = 64, 8, 4
LEARNING_RATE, BETAS, MAX_GRAD_NORM, CLIP = 1e-5, (0.9, 0.95), 1.0, 0.2


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Prompts of equal length, responses padded on the right."""

    ids: Tensor
    """int64 (B, L + T)."""
    response_mask: Tensor
    """bool (B, T)."""
    advantages: Tensor
    """float32 (B,)."""

    @property
    def mask(self) -> Tensor:
        """bool (B, L + T)."""
        prompts = torch.ones(len(self.ids), PROMPT_LENGTH, dtype=torch.bool)
        return torch.cat([prompts, self.response_mask], dim=1)

    @property
    def num_tokens(self) -> int:
        """Prompts and responses, without padding."""
        return int(self.mask.sum())


def read_rows(path: Path) -> Rows:
    """What `make_data` wrote; padding is 0, which is the tokenizer's."""
    held = np.load(path)
    ids, lengths = torch.from_numpy(held["ids"]), torch.from_numpy(held["lengths"])
    response_mask = torch.arange(ids.shape[1] - PROMPT_LENGTH) < lengths[:, None]
    ids[:, PROMPT_LENGTH:][~response_mask] = 0
    return Rows(ids=ids, response_mask=response_mask, advantages=torch.from_numpy(held["advantages"]))
