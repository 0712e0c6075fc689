"""Batched sampling with a key-value cache, in the process that trains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import DynamicCache

from unirl.algorithms.sampling import sample_tokens
from unirl.errors import ConfigError
from unirl.policies.token_lm import TokenLM, left_pad
from unirl.types import Direction, Prompt, Rollout

__all__ = ["NativeEngine", "sample_uniforms"]


def sample_uniforms(seed: Sequence[int], num_samples: int, length: int) -> np.ndarray:
    """Draw the random numbers of each sample from a stream of its own.

    Args:
        seed: What the draw depends on, for example (run seed, stage, step, prompt). Non-negative.
        num_samples: G.
        length: T.

    Returns:
        float64 (G, T) in [0, 1). Row g depends on `seed` and g alone, not on the batch or the rank.
    """
    streams = (
        np.random.Generator(np.random.Philox(np.random.SeedSequence([*seed, g]))) for g in range(num_samples)
    )
    return np.stack([stream.random(length) for stream in streams])


class NativeEngine:
    """Samples from a `TokenLM` with the weights that it has at the moment of the call."""

    def __init__(self, policy: TokenLM) -> None:
        self.policy = policy

    @torch.inference_mode()
    def rollout(
        self,
        prompts: Sequence[Prompt],
        uniforms_PGT: np.ndarray,
        *,
        temperature: float = 1.0,
        policy_version: int = 0,
    ) -> Rollout:
        """Sample G responses for each of P prompts of one direction.

        The prompts are run once and their cache is shared out to the group. A text response ends with `<eos>`
        or is cut after T tokens; a picture always has exactly T = rows x columns codes and is never cut.

        Args:
            prompts: P prompts, all of one direction.
            uniforms_PGT: float64 (P, G, T) in [0, 1); they decide every draw.
            temperature: Divides the logits.
            policy_version: Recorded with the rollout.

        Raises:
            ConfigError: If the directions differ, or T is not the length of a picture.
        """
        policy, direction = self.policy, _common_direction(prompts)
        num_prompts, group_size, length = uniforms_PGT.shape
        codes = policy.vocabulary.grid.length
        if direction == "image" and length != codes:
            raise ConfigError(f"there are {length} random numbers a sample, a picture has {codes} codes")
        uniforms = torch.from_numpy(uniforms_PGT.reshape(num_prompts * group_size, length)).to(policy.device)
        prompt_ids, prompt_mask = left_pad([policy.prompt_ids(p) for p in prompts], policy.vocabulary.pad)
        prompt_ids, prompt_mask = prompt_ids.to(policy.device), prompt_mask.to(policy.device)
        prompt_length = prompt_ids.shape[1]
        cache = DynamicCache(config=policy.lm.config)
        hidden = policy.lm.base_model(
            input_ids=prompt_ids,
            attention_mask=prompt_mask.long(),
            position_ids=(prompt_mask.long().cumsum(dim=1) - 1).clamp_(min=0),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        cache.batch_repeat_interleave(group_size)
        hidden = hidden.repeat_interleave(group_size, dim=0)
        prompt_ids = prompt_ids.repeat_interleave(group_size, dim=0)
        prompt_mask = prompt_mask.repeat_interleave(group_size, dim=0)

        batch = num_prompts * group_size
        attention = torch.cat([prompt_mask, prompt_mask.new_ones(batch, length)], dim=1)
        positions = prompt_mask.sum(dim=1, keepdim=True)
        responses = torch.full((batch, length), policy.vocabulary.pad, device=policy.device)
        logprobs = torch.zeros(batch, length, device=policy.device)
        mask = torch.zeros(batch, length, dtype=torch.bool, device=policy.device)
        running = torch.ones(batch, dtype=torch.bool, device=policy.device)
        allowed = policy.allowed(direction)
        active_rows: list[int] = []
        for t in range(length):
            active_rows.append(int(running.sum()))
            ids, chosen = sample_tokens(
                policy.lm.lm_head(hidden), uniforms=uniforms[:, t], allowed=allowed, temperature=temperature
            )
            responses[:, t] = torch.where(running, ids, responses[:, t])
            logprobs[:, t] = chosen * running
            mask[:, t] = running
            if direction == "text":
                running = running & (ids != policy.vocabulary.eos)
            if t + 1 == length or not running.any():
                break
            hidden = policy.lm.base_model(
                input_ids=responses[:, t : t + 1],
                attention_mask=attention[:, : prompt_length + t + 1].long(),
                position_ids=positions + t,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[:, -1]
        return Rollout(
            prompts=tuple(prompts),
            group_size=group_size,
            input_ids=torch.cat([prompt_ids, responses], dim=1),
            attention_mask=torch.cat([prompt_mask, mask], dim=1),
            prompt_length=prompt_length,
            response_mask=mask,
            old_logprobs=logprobs,
            truncated=running if direction == "text" else torch.zeros_like(running),
            temperature=temperature,
            policy_version=policy_version,
            active_rows=tuple(active_rows),
        )


def _common_direction(prompts: Sequence[Prompt]) -> Direction:
    direction = prompts[0].direction
    for prompt in prompts:
        if prompt.direction != direction:
            raise ConfigError(
                f"{prompt.key}: direction {prompt.direction!r}, the first prompt's is {direction!r}; "
                "roll out one direction at a time"
            )
    return direction
