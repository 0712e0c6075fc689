"""The one distribution that tokens are drawn from and scored under.

    logits -> allowed ids -> guidance -> temperature -> log-probs and entropy

Rollout, old, new and reference log-probs all come from `log_distribution`, so a temperature, a grammar or a
guidance cannot be applied on one side only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real

import torch
from torch import Tensor

from unirl.algorithms.chosen_logprobs import chosen_logprobs
from unirl.algorithms.tensor_checks import as_float, require_mask, require_rank
from unirl.errors import ConfigError, RolloutError, ShapeError

__all__ = ["log_distribution", "sample_tokens", "sampling_errors", "token_logprobs"]

_TEMPERATURES = (1e-6, 1e6)
_GUIDANCES = (0.0, 1e6)
"""Beyond these, logits of a few hundred leave float32, or all log-probs are 0 and -inf."""
_NEUTRAL = {"top_p": 1.0, "top_k": 0.0, "min_p": 0.0}


def sampling_errors(settings: Mapping[str, float]) -> list[str]:
    """Say which settings of a sampler cannot be trained with, and why.

    Args:
        settings: Values by name: temperature, guidance, top_p, top_k, min_p. Other names are not looked at.

    Returns:
        One sentence for each setting that is refused; empty if the sampler draws from the distribution that
        is trained.
    """
    wrong = []
    temperature, guidance = settings.get("temperature", 1.0), settings.get("guidance", 1.0)
    if not _is_within(temperature, _TEMPERATURES):
        wrong.append(
            f"temperature is {temperature!r}; it needs a finite number above 0, {_TEMPERATURES[0]:g} to "
            f"{_TEMPERATURES[1]:g}. Logits are divided by it, "
            "and at 0 every log-prob is 0 or -inf, which leaves no policy gradient. "
            "Take the argmax to decode greedily."
        )
    if not _is_within(guidance, _GUIDANCES):
        wrong.append(
            f"guidance is {guidance!r}; it needs a finite number from 0 to {_GUIDANCES[1]:g}. It scales the "
            "way from the unconditional to the conditional logits; 1 leaves the conditional ones"
        )
    for name, neutral in _NEUTRAL.items():
        value = settings.get(name, neutral)
        # Engines write "no limit" as 0 or as -1.
        is_neutral = value <= 0 if name == "top_k" else value == neutral
        if not is_neutral:
            wrong.append(
                f"{name} is {value:g}; only {neutral:g} (off) can be trained with. It cuts ids off by their "
                "probability, so the set of ids that may be drawn moves with the weights: a token's log-prob "
                "under the new policy can be -inf, and the loss would train another distribution than the "
                "one that was sampled from. Lower the temperature for sharper samples"
            )
    return wrong


def _is_within(value: object, bounds: tuple[float, float]) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and bounds[0] <= float(value) <= bounds[1]


def log_distribution(
    logits: Tensor,
    allowed: Tensor | None = None,
    temperature: float = 1.0,
    *,
    uncond: Tensor | None = None,
    guidance: float = 1.0,
) -> Tensor:
    """Turn logits into the log-probabilities that tokens are drawn from.

        log p[v] = z[v] - log sum_w exp z[w],   z[v] = m[v] / temperature, -inf where not allowed
        m[v] = uncond[v] + guidance (logits[v] - uncond[v])

    Args:
        logits: Float (..., V), of the conditional branch, before temperature.
        allowed: Bool (..., V), any shape that broadcasts to that of `logits`; True on ids that may be drawn.
            None allows every id.
        temperature: Above 0; 1 leaves the model's own distribution.
        uncond: Float, shape of `logits`, of the unconditional branch. Needed if guidance is not 1. Detach it
            to train the conditional branch alone.
        guidance: 0 or more; 1 takes the conditional branch as it is.

    Returns:
        Float32 (float64 for float64 logits) (..., V), nats; -inf on ids that are not allowed.

    Raises:
        ConfigError: If temperature is not a positive number, guidance is negative, or there is guidance
            without an unconditional branch.
        ShapeError: If `allowed` does not broadcast to `logits` or is not bool, or `uncond` has another shape.
        RolloutError: If a position allows no id at all.
    """
    scores, log_total = _scores(logits, allowed, temperature, uncond, guidance)
    return scores - log_total.unsqueeze(-1)


def token_logprobs(
    logits: Tensor,
    ids: Tensor,
    *,
    allowed: Tensor | None = None,
    temperature: float = 1.0,
    uncond: Tensor | None = None,
    guidance: float = 1.0,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """Score given tokens under `log_distribution`, with the entropy of each position.

        logprob = log p[id],   entropy = -sum_v p[v] log p[v]

    Only the chosen entry and the normaliser are kept apart from the scores themselves; no (B, T, V)
    log-probabilities are made.

    Args:
        logits: Float (B, T, V), before temperature; position t predicts ids[:, t].
        ids: Int64 (B, T), each in [0, V).
        allowed: Bool, broadcasting to (B, T, V), for example (T, V) or (V,). None allows every id.
        temperature: Above 0, the one that was sampled with.
        uncond, guidance: As `log_distribution`, the ones that were sampled with.
        entropy_gradient: Let the entropy carry a gradient to `logits`, as the log-probs do. Without it the
            backward pass is cheaper, the log-probs are the same bits, and their gradient is to rounding.

    Returns:
        logprobs (B, T) and entropy (B, T), nats, float32 (float64 for float64 logits). The log-prob of an id
        that is not allowed is -inf; entropy is finite whatever is disallowed.

    Raises:
        ShapeError: If `ids` does not have the shape of `logits` without its last axis.
        ConfigError, RolloutError: As `log_distribution`.
    """
    require_rank(3, logits=logits)
    _require_ids(ids, logits)
    if not (entropy_gradient and torch.is_grad_enabled()):
        mixed = _mixed(logits, allowed, temperature, uncond, guidance)
        return chosen_logprobs(mixed, ids, allowed, temperature)
    scores, log_total = _scores(logits, allowed, temperature, uncond, guidance)
    chosen = scores.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    probs = torch.exp(scores - log_total.unsqueeze(-1))
    # 0 * -inf is NaN, in the value and in the gradient: an id without probability adds nothing.
    expected_score = (probs * scores.masked_fill(scores.isneginf(), 0.0)).sum(-1)
    return chosen - log_total, log_total - expected_score


def sample_tokens(
    logits: Tensor,
    *,
    uniforms: Tensor,
    allowed: Tensor | None = None,
    temperature: float = 1.0,
    uncond: Tensor | None = None,
    guidance: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution at given uniform numbers.

        id = min { v : sum_{w <= v} p[w] > u * sum_w p[w] }

    The draw is a pure function of its arguments: a row's token does not depend on the other rows.

    Args:
        logits: Float (B, V), before temperature.
        uniforms: Float (B,), each in [0, 1); 1.0, which float32 rounding can make, counts as just below 1.
        allowed: Bool, broadcasting to (B, V). None allows every id.
        temperature: Above 0.
        uncond, guidance: As `log_distribution`.

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
    logprobs = log_distribution(logits, allowed, temperature, uncond=uncond, guidance=guidance)
    cumulative = logprobs.detach().double().exp().cumsum(-1)
    total = cumulative[:, -1:]
    target = uniforms.double().unsqueeze(-1) * total
    _require_drawable(total.squeeze(-1), uniforms)
    ids = torch.searchsorted(cumulative, target, right=True)
    # u * total can round up to total; the first id that completes the sum is the last with probability.
    last = torch.searchsorted(cumulative, total.contiguous())
    ids = torch.minimum(ids, last)
    return ids.squeeze(-1), logprobs.gather(-1, ids).squeeze(-1)


def _scores(
    logits: Tensor, allowed: Tensor | None, temperature: float, uncond: Tensor | None, guidance: float
) -> tuple[Tensor, Tensor]:
    """Return z shifted so that its maximum is 0, float (..., V), and log sum exp z, float (...)."""
    scores = _mixed(logits, allowed, temperature, uncond, guidance) / temperature
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    scores.sub_(scores.detach().amax(-1, keepdim=True))
    return scores, scores.logsumexp(-1)


def _mixed(
    logits: Tensor, allowed: Tensor | None, temperature: float, uncond: Tensor | None, guidance: float
) -> Tensor:
    """Check the settings and return m, float (..., V)."""
    wrong = sampling_errors({"temperature": temperature, "guidance": guidance})
    if wrong:
        raise ConfigError("; ".join(wrong))
    if allowed is not None:
        _require_allowed(allowed, logits)
    return _guided(logits, uncond, guidance)


def _guided(logits: Tensor, uncond: Tensor | None, guidance: float) -> Tensor:
    """Mix the branches. Ids that are not allowed are dropped afterwards: -inf on both sides has no mix."""
    if guidance == 1.0:
        return as_float(logits)
    if uncond is None:
        raise ConfigError(
            f"guidance is {guidance} but there are no unconditional logits; run the policy on the "
            "unconditional prompt as well, or set guidance to 1"
        )
    if uncond.shape != logits.shape:
        raise ShapeError(f"uncond has shape {tuple(uncond.shape)}, logits has {tuple(logits.shape)}")
    base = as_float(uncond)
    return base + guidance * (as_float(logits) - base)


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
            "finite logits and a uniform in [0, 1) are needed. NaN comes from weights or logits that are NaN "
            "or infinite: go back to the last good checkpoint, and lower the learning rate"
        )
