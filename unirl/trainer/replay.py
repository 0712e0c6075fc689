"""A rollout's tokens run through the policy again, under the settings that they were drawn under."""

from __future__ import annotations

from torch import nn

from unirl.policies.padding import left_pad
from unirl.policies.policy import Policy, PolicyOutput
from unirl.rollout.engine import require_same_sampling
from unirl.types import Rollout, SamplingSettings

__all__ = ["replay_tokens"]


def replay_tokens(
    model: nn.Module,
    policy: Policy,
    rollout: Rollout,
    sampling: SamplingSettings,
    *,
    detach_uncond: bool = False,
    entropy_gradient: bool = True,
    with_values: bool = True,
) -> PolicyOutput:
    """Score the responses of a rollout.

    Args:
        model: What is run: the policy, its reference, or either as `accelerator.prepare` returned it.
        policy: Gives the unconditional prompts.
        rollout: Its tokens.
        sampling: Temperature and guidance of the caller; they must be those of every token.
        detach_uncond: With guidance, let no gradient into the unconditional branch.
        entropy_gradient, with_values: As for `Policy.forward`.

    Raises:
        RolloutError: If a token was drawn under other settings; both values are named.
    """
    require_same_sampling(rollout, sampling)
    unconditional = None
    if sampling.guidance != 1.0:
        rows = [policy.unconditional_ids(prompt) for prompt in rollout.prompts]
        ids, mask = (
            part.repeat_interleave(rollout.group_size, dim=0).to(rollout.input_ids.device)
            for part in left_pad(rows, policy.vocabulary.pad)
        )
        unconditional = (ids, mask)
    output: PolicyOutput = model(
        rollout.input_ids,
        rollout.attention_mask,
        prompt_length=rollout.prompt_length,
        direction=rollout.direction,
        temperature=sampling.temperature,
        guidance=sampling.guidance,
        unconditional=unconditional,
        detach_uncond=detach_uncond,
        pictures=policy.pictures(rollout.prompts),
        entropy_gradient=entropy_gradient,
        with_values=with_values,
    )
    return output
