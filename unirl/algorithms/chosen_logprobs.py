"""Log-probs of given ids with a gradient that is written down rather than traced."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["chosen_logprobs"]


def chosen_logprobs(
    logits: Tensor, ids: Tensor, allowed: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """Score ids as `unirl.algorithms.token_logprobs` does, without a gradient of the entropy.

        d logprob / d logits[v] = (1[v = id] - p[v]) / temperature

    Log-probs are the same bits as the traced ones; entropy and gradient differ in rounding. For the backward
    pass one (B, T, V) is kept, exp(z - max z), and gone over once; traced, it is four.

    Args:
        logits: Float32 or float64 (B, T, V), guidance mixed in.
        ids: Int64 (B, T).
        allowed: Bool, broadcasting to (B, T, V), or None.
        temperature: Above 0.

    Returns:
        logprobs (B, T), and entropy (B, T) that carries no gradient.
    """
    score: Callable[..., tuple[Tensor, Tensor]] = _ChosenLogprobs.apply
    return score(logits, ids, allowed, temperature)


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, allowed: Tensor | None, temperature: float
    ) -> tuple[Tensor, Tensor]:
        scores = logits if temperature == 1.0 else logits / temperature
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -math.inf)
        scores = scores - scores.amax(-1, keepdim=True)
        chosen = scores.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        weights = scores.exp()
        total = weights.sum(-1)
        log_total = total.log()
        # 0 * -inf is NaN: an id without probability adds nothing.
        expected_score = scores.clamp_(min=torch.finfo(scores.dtype).min).mul_(weights).sum(-1) / total
        entropy = log_total - expected_score
        ctx.save_for_backward(weights, total, ids, chosen.isneginf())
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        weights, total, ids, is_impossible = ctx.saved_tensors
        gradient = gradients[0] / ctx.temperature
        found: Tensor = weights * -(gradient / total).unsqueeze(-1)
        # An id that is not allowed has a log-prob of -inf that no logit can change.
        chosen = gradient.masked_fill(is_impossible, 0.0)
        found.scatter_add_(-1, ids.unsqueeze(-1), chosen.unsqueeze(-1))
        return found, None, None, None
