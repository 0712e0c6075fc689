"""The probe of a native engine: a few tokens through its decoder, scored by the policy."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.algorithms.sampling import sample_tokens
from unirl.errors import RolloutError
from unirl.policies.policy import Policy
from unirl.rollout.decoder import Decoder
from unirl.rollout.vllm_requests import TokenAnswer
from unirl.rollout.weight_sync_probe import Probe, probe_gap, probe_request

__all__ = ["require_same_function"]

PROMPT_TOKENS, NEW_TOKENS = 5, 2
"""The first new token is drawn behind the run of a prompt, the second behind a step."""
MANY_POSITIONS = 1 << 20


def require_same_function(policy: Policy, decoder: Decoder, version: int, *, max_gap: float) -> float:
    """Draw a few tokens of both kinds and compare their log-probs with those of the policy.

    Args:
        policy: What the decoder was synced to; if it is sharded, every rank calls this.
        decoder: Its rows are lost.
        version: Of the weights.
        max_gap: Allowed, nats.

    Returns:
        The largest difference, nats.

    Raises:
        RolloutError: If it is above `max_gap`.
    """
    length = getattr(policy.decoder_config, "max_position_embeddings", None) or MANY_POSITIONS
    worst = 0.0
    for direction in ("text", "image"):
        probe = probe_request(
            policy, direction, max_length=length, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS
        )
        gap = probe_gap(policy, probe, _answer(policy, decoder, probe, version))
        if not gap <= max_gap:
            raise RolloutError(
                f"weight sync, version {version}: on the fixed probe ({direction}) the native engine and the "
                f"policy differ by {gap:.2g} nats, allowed are {max_gap:.2g}; its decoder holds the policy's "
                "tensors and computes something else with them, or in another precision"
            )
        worst = max(worst, gap)
    return worst


@torch.inference_mode()
def _answer(policy: Policy, decoder: Decoder, probe: Probe, version: int) -> TokenAnswer:
    """Draw the probe's tokens, each in the middle of its distribution."""
    prompt, num_new = probe.request.prompts[0], probe.request.max_new_tokens
    device, middle = policy.device, torch.full((1,), 0.5, dtype=torch.float64, device=policy.device)
    row, length = torch.zeros(1, dtype=torch.int64, device=device), len(prompt)
    decoder.open(1, clock=length, capacity=length + num_new)
    ids = torch.tensor([prompt], device=device)
    prefix = decoder.prefill(ids, torch.ones_like(ids, dtype=torch.bool), None)
    decoder.place(row, prefix, row, row + length)
    hidden: Tensor = prefix.hidden
    drawn, logprobs = list[int](), list[float]()
    for place in range(num_new):
        token, logprob = sample_tokens(
            decoder.logits(hidden, probe.direction, slice(None)),
            uniforms=middle,
            allowed=policy.allowed_at(probe.direction, place)[None],
        )
        drawn.append(int(token))
        logprobs.append(float(logprob))
        if len(drawn) == num_new or drawn[-1] == probe.request.end_id:
            break
        hidden = decoder.step(token, row + length + place, [length + place + 1])
    return TokenAnswer(ids=(tuple(drawn),), logprobs=(tuple(logprobs),), policy_version=version)
