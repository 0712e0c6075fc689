"""The one distribution that tokens are drawn from and scored under.

Rollout, old, new and reference log-probs all come from `log_distribution`, so a temperature or a grammar
cannot be applied on one side only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unirl.algorithms.tensor_checks import as_float, require_mask, require_rank
from unirl.errors import ConfigError, RolloutError, ShapeError

__all__ = ["log_distribution", "sample_tokens", "token_logprobs"]


def log_distribution(logits: Tensor, allowed: Tensor | None = None, temperature: float = 1.0) -> Tensor:
    """Turn logits into the log-probabilities that tokens are drawn from.

        log p[v] = z[v] - log sum_w exp z[w],   z[v] = logits[v] / temperature, -inf where not allowed

    Args:
        logits: Float (..., V), before temperature.
        allowed: Bool (..., V), any shape that broadcasts to that of `logits`; True on ids that may be drawn.
            None allows every id.
        temperature: Above 0; 1 leaves the model's own distribution.

    Returns:
        Float32 (float64 for float64 logits) (..., V), nats; -inf on ids that are not allowed.

    Raises:
        ConfigError: If temperature is not a positive number.
        ShapeError: If `allowed` does not broadcast to `logits` or is not bool.
        RolloutError: If a position allows no id at all.
    """
    scores, log_total = _scores(logits, allowed, temperature)
    return scores - log_total.unsqueeze(-1)


def token_logprobs(
    logits: Tensor, ids: Tensor, *, allowed: Tensor | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Score given tokens under `log_distribution`, with the entropy of each position.

        logprob = log p[id],   entropy = -sum_v p[v] log p[v]

    Only the chosen entry and the normaliser are kept apart from the scores themselves; no (B, T, V)
    log-probabilities are made. Both results carry gradients to `logits`.

    Args:
        logits: Float (B, T, V), before temperature; position t predicts ids[:, t].
        ids: Int64 (B, T), each in [0, V).
        allowed: Bool, broadcasting to (B, T, V), for example (T, V) or (V,). None allows every id.
        temperature: Above 0, the one that was sampled with.

    Returns:
        logprobs (B, T) and entropy (B, T), nats, float32 (float64 for float64 logits). The log-prob of an id
        that is not allowed is -inf; entropy is finite whatever is disallowed.

    Raises:
        ShapeError: If `ids` does not have the shape of `logits` without its last axis.
        ConfigError, RolloutError: As `log_distribution`.
    """
    require_rank(3, logits=logits)
    _require_ids(ids, logits)
    scores, log_total = _scores(logits, allowed, temperature)
    chosen = scores.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    probs = torch.exp(scores - log_total.unsqueeze(-1))
    # 0 * -inf is NaN, in the value and in the gradient: an id without probability adds nothing.
    expected_score = (probs * scores.masked_fill(scores.isneginf(), 0.0)).sum(-1)
    return chosen - log_total, log_total - expected_score


def sample_tokens(
    logits: Tensor, *, uniforms: Tensor, allowed: Tensor | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution at given uniform numbers.

        id = min { v : sum_{w <= v} p[w] > u * sum_w p[w] }

    The draw is a pure function of its arguments: a row's token does not depend on the other rows.

    Args:
        logits: Float (B, V), before temperature.
        uniforms: Float (B,), each in [0, 1); 1.0, which float32 rounding can make, counts as just below 1.
        allowed: Bool, broadcasting to (B, V). None allows every id.
        temperature: Above 0.

    Returns:
        ids int64 (B,), always allowed and of positive probability, and their logprobs float32 (B,), nats,
        equal to those of `token_logprobs`.

    Raises:
        ShapeError: If `uniforms` is not (B,).
        RolloutError: If a row has no allowed id, or NaN in its logits, or its uniform is outside [0, 1].
        ConfigError: As `log_distribution`.
    """
    require_rank(2, logits=logits)
    if uniforms.shape != logits.shape[:1]:
        raise ShapeError(
            f"uniforms has shape {tuple(uniforms.shape)}, logits has {tuple(logits.shape)}; "
            f"one uniform a row, shape {tuple(logits.shape[:1])}, is needed"
        )
    logprobs = log_distribution(logits, allowed, temperature)
    cumulative = logprobs.detach().double().exp().cumsum(-1)
    total = cumulative[:, -1:]
    target = uniforms.double().unsqueeze(-1) * total
    _require_drawable(total.squeeze(-1), uniforms)
    ids = torch.searchsorted(cumulative, target, right=True)
    # u * total can round up to total; the first id that completes the sum is the last with probability.
    last = torch.searchsorted(cumulative, total.contiguous())
    ids = torch.minimum(ids, last)
    return ids.squeeze(-1), logprobs.gather(-1, ids).squeeze(-1)


def _scores(logits: Tensor, allowed: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    """Return z shifted so that its maximum is 0, float (..., V), and log sum exp z, float (...)."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(
            f"temperature is {temperature}; it needs a finite number above 0. Logits are divided by it, "
            "and at 0 every log-prob is 0 or -inf, which leaves no policy gradient. "
            "Take the argmax to decode greedily."
        )
    scores = as_float(logits) / temperature
    if allowed is not None:
        _require_allowed(allowed, logits)
        scores = scores.masked_fill(~allowed, -math.inf)
    scores.sub_(scores.detach().amax(-1, keepdim=True))
    return scores, scores.logsumexp(-1)


def _require_allowed(allowed: Tensor, logits: Tensor) -> None:
    require_mask(allowed=allowed)
    shape = tuple(logits.shape)
    fits = allowed.ndim <= logits.ndim and all(
        a in (1, n) for a, n in zip(reversed(allowed.shape), reversed(shape), strict=False)
    )
    if not fits or allowed.ndim == 0 or allowed.shape[-1] != shape[-1]:
        raise ShapeError(
            f"allowed has shape {tuple(allowed.shape)}, logits has {shape}; allowed must broadcast to logits "
            "and have the same last axis"
        )
    if not bool(allowed.any(-1).all()):
        position = tuple((~allowed.any(-1)).nonzero()[0].tolist())
        raise RolloutError(
            f"allowed{list(position)} allows no id at all; the grammar needs one at every position"
        )


def _require_ids(ids: Tensor, logits: Tensor) -> None:
    if ids.shape != logits.shape[:-1] or ids.dtype != torch.int64:
        raise ShapeError(
            f"ids is {ids.dtype} of shape {tuple(ids.shape)}, logits has shape {tuple(logits.shape)}; "
            f"int64 ids of shape {tuple(logits.shape[:-1])} are needed"
        )


def _require_drawable(total: Tensor, uniforms: Tensor) -> None:
    good = total.isfinite() & (total > 0) & (uniforms >= 0) & (uniforms <= 1)
    if not bool(good.all()):
        row = int((~good).nonzero()[0])
        raise RolloutError(
            f"row {row}: total probability is {total[row].item()} and the uniform is {uniforms[row].item()}; "
            "finite logits and a uniform in [0, 1) are needed"
        )
