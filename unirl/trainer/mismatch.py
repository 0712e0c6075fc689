"""How far engine and trainer agree on the tokens of a rollout, and what is done where they do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from unirl.algorithms import token_logprobs, token_metrics, truncated_importance_weights
from unirl.errors import RolloutError
from unirl.policies.padding import token_positions
from unirl.policies.policy import Policy, PolicyOutput
from unirl.trainer.replay import replay_tokens
from unirl.trainer.stages import Stage
from unirl.types import Experience, Rollout

__all__ = [
    "effective_fraction",
    "is_agreement_tested",
    "likely_cause",
    "mismatch_metrics",
    "old_logprobs_and_weights",
    "require_agreement",
    "require_support",
]


def old_logprobs_and_weights(
    output: PolicyOutput, rollout: Rollout, mask: Tensor, stage: Stage
) -> tuple[Tensor, Tensor | None]:
    """Choose what the ratio of the update compares with, and the weights that go with it.

    Without a correction that is what the engine said. With one, it is what the trainer says before the
    update, and each token weighs by how much likelier the trainer makes it than the engine did, cut at
    `stage.importance_limit`; beyond a factor of `stage.importance_mask` either way it weighs nothing.

    Args:
        output: The trainer's, with the weights that the rollout was sampled with.
        rollout: B rows.
        mask: bool (B, T), tokens of the loss.
        stage: Says whether and how.

    Returns:
        Old log-probs float32 (B, T), and weights float32 (B, T) or None for 1 everywhere.

    Raises:
        RolloutError: If the trainer gives a sampled token no probability at all.
    """
    require_support(output, rollout, mask)
    if stage.importance == "none":
        return rollout.old_logprobs, None
    engine, trainer = rollout.old_logprobs, output.logprobs.detach()
    weights = truncated_importance_weights(
        trainer, engine, mask, limit=stage.importance_limit, level=stage.importance
    )
    if stage.importance_mask:
        difference = torch.where(mask, trainer - engine, 0.0)
        if stage.importance == "sequence":
            difference = difference.sum(dim=1, keepdim=True).expand_as(difference)
        beyond = difference.abs().exp() > stage.importance_mask
        weights = weights.masked_fill(beyond, 0.0)
    return trainer, weights


def mismatch_metrics(experience: Experience, output: PolicyOutput, stage: Stage) -> dict[str, Tensor]:
    """Metric sums of one micro-batch: gap and ratio of trainer to engine, and the importance weights."""
    mask = experience.loss_mask
    difference = torch.where(mask, output.logprobs - experience.rollout.old_logprobs, 0.0)
    gap, ratio = difference.abs(), difference.clamp(-20.0, 20.0).exp()
    values = {"logprob_gap": gap, "ratio": ratio}
    metrics = token_metrics("rollout", mask, sums=values, extremes=values)
    if experience.importance is not None:
        weights = experience.importance
        metrics |= token_metrics(
            "importance",
            mask,
            sums={
                "weight": weights,
                "weight_squared": weights.double().square(),
                "truncated_fraction": weights >= stage.importance_limit,
                "masked_fraction": weights == 0.0,
            },
        )
    return metrics


def effective_fraction(metrics: Mapping[str, float]) -> float:
    """Share of the tokens that as many equal weights would stand for: (sum w)^2 / (n sum w^2)."""
    squared = metrics["importance/weight_squared"]
    return metrics["importance/weight"] ** 2 / squared if squared else 0.0


def is_agreement_tested(stage: Stage, stage_step: int) -> bool:
    """Whether `require_agreement` guards a step, counted from 0: the first of critic and of policy."""
    return stage_step in (0, stage.critic_warmup_steps)


def require_agreement(
    seen: Mapping[str, Tensor],
    *,
    place: str,
    allowed: float,
    is_start: bool,
    cause: Callable[[], str],
) -> None:
    """Refuse to train on samples that are not the trainer's own.

    Args:
        seen: Metric sums over all ranks, see `mismatch_metrics` and `kl/reference_sum`.
        place: For the message.
        allowed: Largest difference of a token, nats.
        is_start: The policy is still the reference, so their divergence is 0.
        cause: Looks for the likely cause.

    Raises:
        RolloutError: If engine and trainer differ by more, or policy and reference do at the start.
    """
    gap = float(seen["rollout/logprob_gap_max"])
    if not gap <= allowed:
        tokens = float(seen["rollout/tokens"])
        mean_gap = float(seen["rollout/logprob_gap_sum"]) / tokens
        ratio, ratio_max = float(seen["rollout/ratio_sum"]) / tokens, float(seen["rollout/ratio_max"])
        raise RolloutError(
            f"{place}: rollout and trainer differ by {gap:.2g} nats on a token, allowed are {allowed:.2g} "
            f"(mean {mean_gap:.2g}; ratio {ratio:.4g} on average, {ratio_max:.4g} at most); {cause()}"
        )
    divergence = float(seen["kl/reference_sum"]) / float(seen["kl/tokens"])
    if is_start and not abs(divergence) <= allowed:
        raise RolloutError(
            f"{place}: policy and reference are the same weights but differ by {divergence:.2g} nats a "
            f"token, allowed are {allowed:.2g}; the reference was loaded, padded or cast in another way"
        )


@torch.no_grad()
def likely_cause(policy: Policy, reference: Policy, rollout: Rollout, stage: Stage) -> str:
    """Say what would explain the log-probs of a rollout, by scoring its tokens in the usual wrong ways."""
    sampling, mask = stage.sampling, rollout.response_mask

    def gap(logprobs: Tensor) -> float:
        difference = torch.where(mask, logprobs - rollout.old_logprobs, 0.0)
        return float(difference.abs().sum() / mask.sum().clamp(min=1))

    right = replay_tokens(policy, policy, rollout, sampling).logprobs
    if not right.equal(replay_tokens(policy, policy, rollout, sampling).logprobs):
        return "two runs of the trainer's own forward pass differ: dropout or other noise is on in the policy"
    temperature = sampling.temperature
    tries: dict[str, Callable[[], Tensor]] = {
        "the engine has the reference's weights: it was not synced": lambda: (
            replay_tokens(reference, policy, rollout, sampling).logprobs
        ),
        "the engine's log-probs are those of all ids, without the grammar": lambda: _scored(
            policy, rollout, temperature, with_grammar=False
        ),
        "the engine's log-probs are raw, before grammar and temperature": lambda: _scored(
            policy, rollout, 1.0, with_grammar=False
        ),
        "the engine's log-probs are those at temperature 1": lambda: _scored(policy, rollout, 1.0),
        "the engine samples without guidance": lambda: _scored(policy, rollout, temperature),
    }
    gaps = {name: gap(score()) for name, score in tries.items()}
    best = min(gaps, key=lambda name: gaps[name])
    if gaps[best] < 0.1 * gap(right):
        return f"{best} (so scored, the mean gap is {gaps[best]:.2g})"
    return (
        "scoring at another temperature, without grammar or guidance, or with the reference's weights does "
        "not explain it; look for weights that were not synced, other padding or positions, or low precision"
    )


def _scored(policy: Policy, rollout: Rollout, temperature: float, *, with_grammar: bool = True) -> Tensor:
    """Log-probs (B, T) of the conditional branch alone, whatever the tokens were drawn under."""
    hidden = policy.backbone(
        policy.embed(rollout.input_ids, policy.pictures(rollout.prompts)),
        attention_mask=rollout.attention_mask,
        positions=token_positions(rollout.attention_mask),
    )[:, rollout.prompt_length - 1 : -1]
    allowed = policy.allowed(rollout.direction) if with_grammar else None
    return token_logprobs(
        policy.logits(hidden, rollout.direction),
        rollout.response_ids,
        allowed=allowed[: hidden.shape[1]] if allowed is not None and allowed.ndim == 2 else allowed,
        temperature=temperature,
    )[0]


def require_support(output: PolicyOutput, rollout: Rollout, mask: Tensor) -> None:
    """Refuse samples with a token (of the mask) that the trainer gives no probability at all."""
    outside = mask & ~output.logprobs.isfinite()
    if bool(outside.any()):
        row, token = outside.nonzero()[0].tolist()
        raise RolloutError(
            f"{rollout.prompts[row // rollout.group_size].key}, row {row}, token {token}: id "
            f"{int(rollout.response_ids[row, token])} was sampled where the grammar of {rollout.direction!r} "
            "does not allow it; give the engine the policy's allowed ids"
        )
