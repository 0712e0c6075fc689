"""Generation with a vision-language model in this process: one token at a time, over its key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from unirl.rewards.backends.base import Generation
from unirl.rewards.backends.prompts import PaddedPrompts

if TYPE_CHECKING:
    from unirl.rewards.backends.qwen import TransformersBackend

__all__ = ["speak"]


def speak(
    backend: TransformersBackend,
    prompts: PaddedPrompts,
    features: dict[str, Tensor],
    *,
    max_new_tokens: int,
    temperature: float,
    seeds: Sequence[Sequence[int]],
    stop: Sequence[str],
) -> list[Generation]:
    """Continue B prompts until each has ended, said a stop text, or reached the limit.

    A row's random numbers come from its own seed, so that it says the same alone and in company.
    """
    network, ends = backend.model, _end_ids(backend)
    generators = [np.random.default_rng(seed) for seed in seeds]
    rows = [_Row(backend, stop, ends) for _ in seeds]
    output = backend.read(prompts, features, use_cache=True)
    mask = torch.from_numpy(prompts.mask).to(network.device)
    position = torch.from_numpy(prompts.next_position).to(network.device)
    for _ in range(max_new_tokens):
        logprobs = output.logits[:, -1].double().log_softmax(-1)
        uniforms = [generator.random() for generator in generators]
        chosen = _choose(logprobs, temperature, uniforms)
        said = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        for row, token, logprob in zip(rows, chosen.tolist(), said):
            row.add(token, logprob)
        if all(row.is_done for row in rows):
            break
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        output = network(
            input_ids=chosen[:, None],
            attention_mask=mask,
            position_ids=position.expand(3, -1)[:, :, None],
            past_key_values=output.past_key_values,
            use_cache=True,
        )
        position = position + 1
    return [row.generation() for row in rows]


def _choose(logprobs: Tensor, temperature: float, uniforms: Sequence[float]) -> Tensor:
    """int64 (B,): the most likely token, or the one at which the cumulative probability passes a number."""
    if temperature == 0:
        return logprobs.argmax(-1)
    cumulative = (logprobs / temperature).softmax(-1).cumsum(-1)
    wanted = cumulative.new_tensor(uniforms)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, wanted, right=True)[:, 0].clamp(max=logprobs.shape[1] - 1)


def _end_ids(backend: TransformersBackend) -> set[int]:
    stated = backend.model.generation_config.eos_token_id if backend.model.generation_config else None
    ends = stated if isinstance(stated, list) else [stated]
    return {token for token in (*ends, backend.tokenizer.eos_token_id) if token is not None}


class _Row:
    """What one row has said so far."""

    def __init__(self, backend: TransformersBackend, stop: Sequence[str], ends: set[int]) -> None:
        self._tokenizer, self._stop, self._ends = backend.tokenizer, stop, ends
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._text = ""
        self.is_done = False

    def add(self, token: int, logprob: float) -> None:
        if self.is_done:
            return
        self._logprobs.append(logprob)
        if token in self._ends:
            self.is_done = True
            return
        self._ids.append(token)
        self._text = str(self._tokenizer.decode(self._ids, skip_special_tokens=True))
        found = [place for text in self._stop if (place := self._text.find(text)) >= 0]
        if found:
            self._text, self.is_done = self._text[: min(found)], True

    def generation(self) -> Generation:
        return Generation(text=self._text, token_logprobs=tuple(self._logprobs), truncated=not self.is_done)
