"""The last proof of a sync: the engine's own samples, scored by the trainer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unirl.errors import RolloutError
from unirl.policies.policy import Policy
from unirl.rollout.vllm_requests import AllowedIds, TokenAnswer, TokenEngine, TokenRequest
from unirl.types import Direction

__all__ = ["PROBE_GAPS", "Probe", "probe_gap", "probe_request", "require_agreement"]

PROBE_GAPS = {"float64": 1e-4, "float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
"""Largest difference, nats, between engine and trainer that a dtype explains."""
PROMPT_TOKENS = 33
"""One more than a block of vLLM's cache, so that a block that was kept from old weights is used, and seen."""
NEW_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was asked, and in which direction."""

    direction: Direction
    request: TokenRequest


def probe_request(
    policy: Policy,
    direction: Direction,
    *,
    max_length: int,
    prompt_tokens: int = PROMPT_TOKENS,
    new_tokens: int = NEW_TOKENS,
) -> Probe:
    """Ask for a few tokens behind a fixed prompt of words and image codes.

    The prompt is the same every time, for both directions.

    Args:
        policy: Gives vocabulary and grammar.
        direction: Of the response.
        max_length: Positions of the model; short models get a short prompt.
        prompt_tokens: Of the prompt.
        new_tokens: Of the response, at most.
    """
    vocabulary = policy.vocabulary
    tokens = min(new_tokens, policy.max_response_length(direction, new_tokens), max_length - 1)
    rng = np.random.Generator(np.random.Philox(0))
    known = (policy.allowed("text") | _anywhere(policy.allowed("image"))).nonzero()[:, 0].tolist()
    prompt = rng.choice(known, size=min(prompt_tokens, max_length - tokens))
    grammar = vocabulary.grammar(direction)
    return Probe(
        direction=direction,
        request=TokenRequest(
            prompts=(tuple(int(i) for i in prompt),),
            seeds=(0,),
            max_new_tokens=tokens,
            temperature=1.0,
            guidance=1.0,
            allowed=AllowedIds.from_masks(grammar.masks, grammar.places[:tokens]),
            end_id=vocabulary.eos if direction == "text" else None,
        ),
    )


@torch.no_grad()
def probe_gap(policy: Policy, probe: Probe, answer: TokenAnswer) -> float:
    """Largest difference, nats, between the engine's log-probs and the policy's for the same tokens."""
    prompt, length = probe.request.prompts[0], probe.request.max_new_tokens
    pad = policy.vocabulary.pad
    rows = [[*prompt, *ids, *[pad] * (length - len(ids))] for ids in answer.ids]
    mask = [[True] * (len(prompt) + len(ids)) + [False] * (length - len(ids)) for ids in answer.ids]
    output = policy(
        torch.tensor(rows, device=policy.device),
        torch.tensor(mask, device=policy.device),
        prompt_length=len(prompt),
        direction=probe.direction,
        with_values=False,
    )
    return max(
        float((output.logprobs[row, : len(theirs)].cpu() - torch.tensor(theirs)).abs().max())
        for row, theirs in enumerate(answer.logprobs)
    )


def _anywhere(allowed: Tensor) -> Tensor:
    """bool (V,): True on ids that may stand at some place."""
    return allowed.any(dim=0) if allowed.ndim == 2 else allowed


def require_agreement(
    policy: Policy,
    engine: TokenEngine,
    version: int,
    *,
    max_length: int,
    max_gap: float,
    is_sender: bool = True,
) -> float:
    """Probe both directions; return the larger gap.

    Args:
        policy: The trainer's; every rank scores the same tokens, since its weights may be sharded.
        engine: Has the weights.
        version: Of the weights.
        max_length: Positions of the model.
        max_gap: Allowed, nats.
        is_sender: This rank asks the engine; the others are told the answer.

    Raises:
        RolloutError: If it is above `max_gap`.
    """
    worst = 0.0
    for direction in ("text", "image"):
        probe = probe_request(policy, direction, max_length=max_length)
        answer = [engine.generate(probe.request, step=version) if is_sender else None]
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            torch.distributed.broadcast_object_list(answer)
        found = answer[0]
        if found is None:
            raise RolloutError(f"weight sync, version {version}: no rank asked {engine.info.endpoint}")
        found.check(probe.request)
        gap = probe_gap(policy, probe, found)
        if not gap <= max_gap:
            raise RolloutError(
                f"weight sync, version {version}: all tensors have arrived at {engine.info.endpoint}, but on "
                f"the fixed probe ({direction}) engine and trainer differ by {gap:.2g} nats, allowed are "
                f"{max_gap:.2g}; the usual causes are a cache of old keys and values, a head that is a copy "
                "(lm_head.weight), another dtype, or a model class that vLLM computes otherwise"
            )
        worst = max(worst, gap)
    return worst
