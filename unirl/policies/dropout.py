"""No dropout anywhere: it would make the sampled and the trained distribution differ."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["silence_dropout"]


def silence_dropout(model: nn.Module) -> None:
    """Set every dropout rate of a model to 0, so that no mode of it drops anything.

    Layers of transformers keep some of their rates as plain numbers that they read in each forward pass.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        rates: dict[str, Any] = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, float) and ("dropout" in name or "dropprob" in name)
        }
        for name in rates:
            setattr(module, name, 0.0)
