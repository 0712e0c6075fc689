"""The frozen reference that a policy is kept near."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PretrainedConfig

from unirl.errors import ConfigError
from unirl.policies.adapters import adapters_off, has_adapters
from unirl.policies.critic import ValueHead
from unirl.policies.policy import EVERY_ID, Policy, PolicyOutput
from unirl.types import Direction, Prompt

__all__ = ["BaseReference", "reference_of"]


def reference_of(policy: Policy) -> Policy:
    """The policy as it is now, frozen.

    With LoRA it is the base model with the adapters off: the weights are the policy's own, not a second copy,
    and they never change. Without it is a copy, whose critic knows nothing: nobody asks it.
    """
    if has_adapters(policy.lm):
        return BaseReference(policy)
    critic = policy.critic
    copy = deepcopy(policy, {id(critic): ValueHead(critic.width).to(policy.device)})
    return copy.requires_grad_(False)


class BaseReference(Policy):
    """A policy with LoRA adapters, seen without them. It holds no tensor of its own."""

    def __init__(self, policy: Policy) -> None:
        nn.Module.__init__(self)
        # In a tuple, so that it is no submodule: its parameters are the trainer's, not the reference's.
        self._held = (policy,)
        self.vocabulary = policy.vocabulary

    def __getattr__(self, name: str) -> Any:
        if name in {"lm", "critic"}:
            return getattr(self._held[0], name)
        return super().__getattr__(name)

    @property
    def decoder_config(self) -> PretrainedConfig:
        """As the policy's."""
        return self._held[0].decoder_config

    def allowed(self, direction: Direction) -> Tensor:
        """As the policy's."""
        return self._held[0].allowed(direction)

    def allowed_at(self, direction: Direction, place: int) -> Tensor:
        """As the policy's."""
        return self._held[0].allowed_at(direction, place)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """As the policy's."""
        return self._held[0].prompt_ids(prompt)

    def unconditional_ids(self, prompt: Prompt) -> list[int]:
        """As the policy's."""
        return self._held[0].unconditional_ids(prompt)

    def pictures(self, prompts: Any) -> Tensor | None:
        """As the policy's."""
        return self._held[0].pictures(prompts)

    def picture_key(self, prompt: Prompt) -> str:
        """As the policy's."""
        return self._held[0].picture_key(prompt)

    def embed(self, ids: Tensor, pictures: Tensor | None = None) -> Tensor:
        """As the policy's, without adapters."""
        with adapters_off(self.lm):
            return self._held[0].embed(ids, pictures)

    @property
    def trunk(self) -> nn.Module:
        """As the policy's; `backbone` runs it without adapters."""
        return self._held[0].trunk

    def backbone(
        self, embeds: Tensor, *, attention_mask: Tensor, positions: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """As the policy's, without adapters."""
        with adapters_off(self.lm):
            return self._held[0].backbone(
                embeds, attention_mask=attention_mask, positions=positions, cache=cache
            )

    def logits(self, hidden: Tensor, direction: Direction, ids: slice = EVERY_ID) -> Tensor:
        """As the policy's, without adapters."""
        with adapters_off(self.lm):
            return self._held[0].logits(hidden, direction, ids)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> PolicyOutput:
        """Score responses as the base model does; no gradient, and no values."""
        with adapters_off(self.lm):
            return cast(PolicyOutput, self._held[0](*args, **{**kwargs, "with_values": False}))

    def save(self, directory: Path, *, is_writer: bool = True) -> None:
        """Refused: the reference's weights are the policy's."""
        raise ConfigError(f"{directory}: the reference is the policy without its adapters; save the policy")

    @classmethod
    def load(
        cls, directory: Path, *, dtype: torch.dtype = torch.float32, attention: str | None = None
    ) -> BaseReference:
        """Refused: it is made from a policy."""
        raise ConfigError(f"{directory}: load the policy and use reference_of")
