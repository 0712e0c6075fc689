"""The critic: a value for every token, read off the policy's trunk."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["ValueHead"]


class ValueHead(nn.Module):
    """Two layers from the trunk's hidden state to a value.

    The trunk is detached: what the critic learns never moves the policy, so no coefficient has to balance
    the two losses. The last layer starts at zero, so the first values are 0 whatever the seed.
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
            features = nn.functional.gelu(self.hidden(self.norm(hidden.detach().to(self.value.weight.dtype))))
            values: Tensor = self.value(features)
        return torch.squeeze_copy(values, -1)
