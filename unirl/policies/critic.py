"""The critic: a value for every token, read off the policy's trunk or off one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

__all__ = ["OwnCritic", "ValueHead", "run_trunk"]


def run_trunk(
    trunk: nn.Module,
    vectors: Tensor,
    *,
    attention_mask: Tensor,
    positions: Tensor,
    cache: Cache | None = None,
) -> Tensor:
    """Hidden states (B, T, D), behind the last norm, of a model of transformers without its head.

    The arguments are those of `Policy.backbone`.
    """
    hidden: Tensor = trunk(
        inputs_embeds=vectors,
        attention_mask=attention_mask.long() if attention_mask.ndim == 2 else attention_mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=cache is not None,
    ).last_hidden_state
    return hidden


class ValueHead(nn.Module):
    """Two layers from a hidden state to a value. The last one starts at zero, so the first values are 0.

    On the policy's trunk it is the whole critic. `Policy.forward` cuts the gradient between them: what the
    critic learns never moves the policy, so no coefficient has to balance the two losses.
    """

    def __init__(self, width: int, *, seed: int = 0) -> None:
        super().__init__()
        self.width = width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.norm = nn.LayerNorm(width)
            self.hidden = nn.Linear(width, 2 * width)
            self.value = nn.Linear(2 * width, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (B, T) values, in reward units, of hidden states (B, T, D), in the critic's own dtype."""
        with torch.autocast(hidden.device.type, enabled=False):
            features = nn.functional.gelu(self.hidden(self.norm(hidden.to(self.value.weight.dtype))))
            values: Tensor = self.value(features)
        return torch.squeeze_copy(values, -1)

    def fresh(self, trunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Names and values of the parameters of a critic that has learnt nothing."""
        yield from ValueHead(self.width).named_parameters()


class OwnCritic(nn.Module):
    """A critic that shares no layer with the policy: a trunk of the same class, and a head on it.

    The trunk begins as a copy of the policy's and is trained where the policy's is: all of it, or its LoRA
    adapters. It reads the vectors that the policy's own embedding makes of the tokens, and moves neither.
    """

    def __init__(self, trunk: nn.Module, *, width: int) -> None:
        """Copy a policy's trunk.

        Args:
            trunk: Of the policy, as it is now.
            width: Of its hidden states.
        """
        super().__init__()
        self.width = width
        self.trunk = deepcopy(trunk)
        cast(PreTrainedModel, self.trunk).set_input_embeddings(nn.Identity())
        self.head = ValueHead(width)

    def forward(self, vectors: Tensor, *, attention_mask: Tensor, positions: Tensor, behind: int) -> Tensor:
        """Return (B, T) values, in reward units.

        Args:
            vectors: (B, L + T, D), what the tokens are embedded as; no gradient goes into them.
            attention_mask: bool (B, L + T).
            positions: int64 (B, L + T).
            behind: L, tokens before the first one that has a value. 0 gives every position its value.
        """
        hidden = run_trunk(self.trunk, vectors.detach(), attention_mask=attention_mask, positions=positions)
        values: Tensor = self.head(hidden[:, behind - 1 : -1] if behind else hidden)
        return values

    def fresh(self, trunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Names and values of the parameters of a critic that has learnt nothing, on a policy's trunk now."""
        own = dict(self.trunk.named_parameters())
        yield from ((f"trunk.{name}", value) for name, value in trunk.named_parameters() if name in own)
        yield from ((f"head.{name}", value) for name, value in ValueHead(self.width).named_parameters())
