"""Decoding through the policy's own forward pass, for models that have no decoder of their own here."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from unirl.errors import ConfigError
from unirl.policies.padding import token_positions
from unirl.policies.policy import Policy
from unirl.policies.sharded_tensors import is_sharded
from unirl.rollout.decoder import Prefix
from unirl.rollout.weight_copies import WeightCopies
from unirl.types import Direction

__all__ = ["CopyDecoder", "GenericDecoder"]


class GenericDecoder:
    """Any policy, with a cache of transformers that grows by one column a step.

    It holds no weights: it decodes with those of the policy that it was synced to.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.copies: WeightCopies | None = None
        self._cache = DynamicCache()
        self._seen = torch.empty(0, 0, dtype=torch.bool)
        self._num_rows = self._clock = 0

    @property
    def dtype(self) -> torch.dtype:
        """The policy's."""
        return self.policy.dtype

    def sync(self, policy: Policy) -> None:
        """Decode with this policy from now on.

        Raises:
            ConfigError: If its weights are sharded: ranks that decode for different times would wait for
                each other for ever.
        """
        if is_sharded(policy):
            raise ConfigError(
                f"{type(policy).__name__}: its weights are sharded, so an engine needs a copy of them; "
                "make it before they are, as NativeEngine(policy, own_weights=True)"
            )
        self.policy = policy

    def require_same(self, policy: Policy) -> None:
        """Nothing to compare: there are no other tensors than the policy's."""

    def open(self, num_rows: int, *, clock: int, capacity: int) -> None:
        """Forget all rows; memory is taken as they grow."""
        self._cache = DynamicCache()
        self._seen = torch.zeros(num_rows, clock, dtype=torch.bool, device=self.policy.device)
        self._num_rows, self._clock = num_rows, clock

    def prefill(self, ids: Tensor, mask: Tensor, pictures: Tensor | None) -> Prefix:
        """Run prompts with a cache of their own."""
        cache = DynamicCache()
        hidden = self.policy.backbone(
            self.policy.embed(ids, pictures),
            attention_mask=mask,
            positions=token_positions(mask),
            cache=cache,
        )
        return Prefix(
            hidden=hidden[:, -1],
            keys=tuple(layer.keys for layer in _layers(cache)),
            values=tuple(layer.values for layer in _layers(cache)),
        )

    def place(self, rows: Tensor, prefix: Prefix, which: Tensor, lengths: Tensor) -> None:
        """Write the prompts into the columns before the clock."""
        self._fill(prefix)
        start = self._clock - prefix.keys[0].shape[2]
        for layer, keys, values in zip(_layers(self._cache), prefix.keys, prefix.values, strict=True):
            layer.keys[rows, :, start:] = keys[which]
            layer.values[rows, :, start:] = values[which]
        self._seen[rows] = torch.arange(self._clock, device=rows.device) >= (self._clock - lengths)[:, None]

    def step(self, ids: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        """Append a token to every row; columns older than the longest row are dropped."""
        unused = self._clock + 1 - max(lengths)
        if unused > 0:
            for layer in _layers(self._cache):
                layer.keys, layer.values = layer.keys[:, :, unused:], layer.values[:, :, unused:]
            self._seen = self._seen[:, unused:]
        self._seen = torch.cat([self._seen, self._seen.new_ones(self._num_rows, 1)], dim=1)
        self._clock = self._seen.shape[1]
        hidden = self.policy.backbone(
            self.policy.embed(ids[:, None]),
            attention_mask=self._seen,
            positions=positions[:, None],
            cache=self._cache,
        )
        return hidden[:, 0]

    def move(self, source: Tensor, target: Tensor, num_rows: int) -> None:
        """Copy whole rows and drop the last ones."""
        for layer in _layers(self._cache):
            layer.keys[target], layer.values[target] = layer.keys[source], layer.values[source]
            layer.keys, layer.values = layer.keys[:num_rows], layer.values[:num_rows]
        self._seen[target] = self._seen[source]
        self._seen = self._seen[:num_rows]
        self._num_rows = num_rows

    def logits(self, hidden: Tensor, direction: Direction, ids: slice) -> Tensor:
        """Return the policy's logits of some ids."""
        return self.policy.logits(hidden, direction, ids)

    def _fill(self, prefix: Prefix) -> None:
        """Make the columns up to the clock, the first time that a prompt shows their shape."""
        if self._cache.layers:
            return
        for i, keys in enumerate(prefix.keys):
            empty = keys.new_zeros(self._num_rows, keys.shape[1], self._clock, keys.shape[3])
            self._cache.update(empty, empty.clone(), i)


class CopyDecoder(GenericDecoder):
    """A `GenericDecoder` with a copy of the policy, whose weights each sync brings up to date."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(deepcopy(policy).requires_grad_(False))
        self.copies: WeightCopies = WeightCopies(self.policy.lm.state_dict())

    def sync(self, policy: Policy) -> None:
        """Copy all weights, adapters included; with sharded ones, all ranks call it together."""
        if policy.device != self.policy.device:
            self.policy.to(policy.device)
            self.copies = WeightCopies(self.policy.lm.state_dict())
        self.copies.load(policy.lm.state_dict().items())

    def require_same(self, policy: Policy) -> None:
        """Compare all weights, adapters included."""
        self.copies.require_same(policy.lm.state_dict().items())


def _layers(cache: DynamicCache) -> list[Any]:
    """Layers with `keys` and `values`; the library's own type allows for layers that have neither."""
    return list(cache.layers)
