"""How a run is spread over processes, and in which precision it computes. Said by the run's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["Distribution", "MixedPrecision", "Sharding", "wrong_distribution"]

Sharding = Literal["none", "fsdp2"]
MixedPrecision = Literal["no", "bf16", "fp16"]

LOGPROB_GAPS = {"no": 0.0, "bf16": 0.1, "fp16": 0.02}
"""Differences of log-probs, nats, that rounding explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """What each process holds and computes in. None of it changes what a run learns, beyond rounding."""

    sharding: Sharding = "none"
    """"none": every process holds the whole model, and gradients are averaged (DDP). "fsdp2": each holds a
    part of every parameter, gradient and optimizer state, and gathers one decoder layer at a time."""
    mixed_precision: MixedPrecision = "no"
    """Matrices are multiplied in this format; weights, critic, log-probs and optimizer stay in float32.
    "fp16" scales the loss and needs a GPU."""
    checkpoint_activations: bool = False
    """Keep only the input of each decoder layer and compute the rest again in the backward pass."""
    offload_reference: bool = False
    """Keep the reference's weights in the memory of the host while they are not used."""

    @property
    def logprob_gap(self) -> float:
        """Difference of log-probs between two engines, nats, that the precision alone explains."""
        return LOGPROB_GAPS[self.mixed_precision]


def wrong_distribution(distribution: Distribution) -> list[str]:
    """Say what is wrong with the values, one line each."""
    known = {"sharding": get_args(Sharding), "mixed_precision": get_args(MixedPrecision)}
    return [
        f"settings.distribution: {name} is {getattr(distribution, name)!r}; choose one of {', '.join(words)}"
        for name, words in known.items()
        if getattr(distribution, name) not in words
    ]
