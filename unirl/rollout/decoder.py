"""What the native engine asks of a decoder: a cache of rows that all grow by one column a step.

All rows share one clock. A row's tokens stand in the columns right before it, so a new row can take a place
at any time: its prompt is written into the columns that end where the clock stands, and a mask hides what an
earlier row left there. Positions are the row's own; columns are only places in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from unirl.policies.policy import Policy
from unirl.rollout.weight_copies import WeightCopies
from unirl.types import Direction

__all__ = ["Decoder", "Prefix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """N prompts that were run once, to be given to any number of rows."""

    hidden: Tensor
    """(N, D), of each prompt's last token."""
    keys: tuple[Tensor, ...]
    """One (N, heads, L, head width) a layer, padded on the left."""
    values: tuple[Tensor, ...]


class Decoder(Protocol):
    """A model with a cache of rows."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights that it computes with."""
        ...

    @property
    def copies(self) -> WeightCopies | None:
        """Its own tensors, as they arrived with the last `sync`; None if it computes with the policy's."""
        ...

    def sync(self, policy: Policy) -> None:
        """Take over the policy's present weights.

        Raises:
            RolloutError: If a copy is not what it was made from; the tensor is named.
        """
        ...

    def require_same(self, policy: Policy) -> None:
        """Compare its own tensors with the policy's.

        Raises:
            RolloutError: With the first tensor that differs.
        """
        ...

    def open(self, num_rows: int, *, clock: int, capacity: int) -> None:
        """Make room for rows of at most `capacity` tokens; no prompt is longer than `clock` tokens."""
        ...

    def prefill(self, ids: Tensor, mask: Tensor, pictures: Tensor | None) -> Prefix:
        """Run prompts, int64 (N, L) and bool (N, L), padded on the left. The rows stay as they are."""
        ...

    def place(self, rows: Tensor, prefix: Prefix, which: Tensor, lengths: Tensor) -> None:
        """Let rows (K,) begin behind prompts `which` (K,) of a prefix, `lengths` (K,) tokens each."""
        ...

    def step(self, ids: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        """Append one token to every row and return the hidden states (R, D) behind the last norm.

        Args:
            ids: int64 (R,).
            positions: int64 (R,).
            lengths: R, tokens of each row with the new one; 1 for a row that does not count. What is older
                than the longest can be dropped.
        """
        ...

    def move(self, source: Tensor, target: Tensor, num_rows: int) -> None:
        """Copy rows `source` (K,) to `target` (K,) and keep the first `num_rows`."""
        ...

    def logits(self, hidden: Tensor, direction: Direction, ids: slice) -> Tensor:
        """Return logits (..., K) of some ids, from hidden states (..., D)."""
        ...
