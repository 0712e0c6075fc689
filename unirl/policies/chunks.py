"""Log-probs of long responses without the logits of all positions at once."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["score_in_chunks"]


class Score(Protocol):
    """Scores the response tokens from `start` to `end` from the hidden states that they are drawn from."""

    def __call__(
        self, start: int, end: int, hidden: Tensor, uncond: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...


def score_in_chunks(
    score: Score, hidden: Tensor, uncond: Tensor | None, *, positions: int
) -> tuple[Tensor, Tensor]:
    """Score T response tokens some at a time; the backward pass scores each chunk a second time.

    Memory for logits and what the backward pass keeps of them is `positions` x V instead of B x T x V. The
    head is run twice, which costs as much again as its forward pass.

    Args:
        score: Gives log-probs and entropy, (B, end - start) each.
        hidden: (B, T, D) of the conditional branch.
        uncond: (B, T, D) of the unconditional branch, or None.
        positions: Rows times tokens of a chunk, at least one token of each row; 0 scores all at once.

    Returns:
        Log-probs and entropy, (B, T) each.
    """
    rows, length = hidden.shape[:2]
    step = max(positions // max(rows, 1), 1) if positions else length
    if step >= length:
        return score(0, length, hidden, uncond)
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, length, step):
        end = min(start + step, length)
        arguments = (start, end, hidden[:, start:end], None if uncond is None else uncond[:, start:end])
        again = torch.is_grad_enabled()
        parts.append(checkpoint(score, *arguments, use_reentrant=False) if again else score(*arguments))
    return torch.cat([part[0] for part in parts], dim=1), torch.cat([part[1] for part in parts], dim=1)
