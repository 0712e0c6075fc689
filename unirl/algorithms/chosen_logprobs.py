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

    Values and gradient are the same bits as the traced ones. For the backward pass one (B, T, V) is kept, the
    probabilities, and gone over twice; traced, it is four.

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
        scores = logits / temperature
        if allowed is not None:
            scores.masked_fill_(~allowed, -math.inf)
        scores.sub_(scores.amax(-1, keepdim=True))
        log_total = scores.logsumexp(-1)
        chosen = scores.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        probs = (scores - log_total.unsqueeze(-1)).exp_()
        # 0 * -inf is NaN: an id without probability adds nothing.
        expected_score = scores.masked_fill_(scores.isneginf(), 0.0).mul_(probs).sum(-1)
        entropy = log_total - expected_score
        ctx.save_for_backward(probs, ids, chosen.isneginf())
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probs, ids, is_impossible = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(-1)
        found = probs * -gradient
        # An id that is not allowed has a log-prob of -inf that no logit can change.
        found.scatter_add_(-1, ids.unsqueeze(-1), gradient.masked_fill(is_impossible.unsqueeze(-1), 0.0))
        return found if ctx.temperature == 1.0 else found.div_(ctx.temperature), None, None, None
