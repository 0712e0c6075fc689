"""Policies of the rollout benchmark: random weights, since only their sizes matter."""

from __future__ import annotations

import functools

import numpy as np

from unirl.policies.token_lm import PolicyConfig, TokenLM
from unirl.policies.vocabulary import JointVocabulary
from unirl.types import Direction, Prompt

__all__ = ["NUM_CODES", "drawing_policy", "endless_writer", "large_policy", "prompts"]

NUM_CODES = 256
WORDS = tuple(f"word{i:03d}" for i in range(250))
TINY = {"width": 256, "num_layers": 4, "num_heads": 4, "mlp_width": 512, "max_length": 1024}
"""With 512 ids, a Llama of 2.9M parameters."""


def drawing_policy(length: int) -> TokenLM:
    """A tiny Llama whose pictures have `length` codes, a square number or twice one."""
    return TokenLM.create(PolicyConfig(**TINY), _vocabulary(length), seed=0)


def endless_writer(limit: int) -> TokenLM:
    """A tiny Llama that never ends a text, so that every sample has the length that it is cut at."""
    policy = TokenLM.create(PolicyConfig(**TINY), _vocabulary(16), seed=0)
    policy.masks_text[:, policy.vocabulary.eos] = False
    return policy


def large_policy(layers: int) -> TokenLM:
    """A Llama of 100M parameters at 12 layers."""
    config = PolicyConfig(width=768, num_layers=layers, num_heads=12, mlp_width=2432, max_length=64)
    return TokenLM.create(config, _vocabulary(16), seed=0)


@functools.cache
def prompts(direction: Direction, num: int) -> list[Prompt]:
    """Prompts of eight words, or of a small picture."""
    codes = np.random.default_rng(0).integers(0, NUM_CODES, (num, 16))
    return [
        Prompt(key=f"p{i}", direction=direction, caption=" ".join(WORDS[8 * i : 8 * i + 8]), codes=codes[i])
        for i in range(num)
    ]


def _vocabulary(length: int) -> JointVocabulary:
    return JointVocabulary.from_captions(WORDS, num_codes=NUM_CODES, rows=length // 8, columns=8)
