"""An engine that samples nothing: it answers every prompt with its true response."""

from __future__ import annotations

from dataclasses import replace

import torch

from unirl.policies.policy import Policy
from unirl.rollout.engine import PartialSample, RolloutRequest, assemble, begin
from unirl.trainer.replay import replay_tokens
from unirl.types import Rollout

__all__ = ["TrueResponses"]


class TrueResponses:
    """Supervised data as rollouts, for a critic that is to know good answers before the policy gives any."""

    def __init__(self, policy: Policy) -> None:
        self.policy_version = 0
        self._policy = policy

    def sync(self, policy: Policy, version: int) -> None:
        """Take note of the policy, whose log-probs of the true responses are given with them."""
        self._policy, self.policy_version = policy, version

    @torch.no_grad()
    def rollout(self, request: RolloutRequest) -> Rollout:
        """Every sample of a prompt is its true response, cut at the limit.

        Raises:
            ConfigError: If a response is not known: codes are missing, or a word that the vocabulary lacks.
        """
        policy = self._policy
        rollout = assemble(
            [self._answered(sample) for sample in begin(request)],
            prompt_ids=[policy.prompt_ids(prompt) for prompt in request.prompts],
            group_size=request.group_size,
            pad=policy.vocabulary.pad,
            device=policy.device,
        )
        logprobs = replay_tokens(policy, policy, rollout, request.sampling).logprobs
        return replace(rollout, old_logprobs=torch.where(rollout.response_mask, logprobs, 0.0))

    def close(self) -> None:
        """Nothing is held."""

    def _answered(self, sample: PartialSample) -> PartialSample:
        ids = self._policy.response_ids(sample.prompt)
        cut = ids[: sample.max_new_tokens]
        return replace(
            sample,
            ids=tuple(cut),
            logprobs=(0.0,) * len(cut),
            versions=(self.policy_version,) * len(cut),
            is_ended=len(cut) == len(ids),
        )
