"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from typing import Literal, get_args

from unirl.errors import ConfigError

__all__ = ["Decay", "learning_rate_factor"]

Decay = Literal["constant", "linear", "cosine"]


def learning_rate_factor(
    step: int, *, warmup_steps: int, total_steps: int, decay: Decay = "constant", floor: float = 0.0
) -> float:
    """Return what the peak learning rate is multiplied by at a step.

        step < warmup:  (step + 1) / warmup
        after:          p = min((step - warmup) / (total - warmup), 1)
                        constant 1;  linear 1 - (1 - floor) p;  cosine floor + (1 - floor) (1 + cos pi p) / 2

    Args:
        step: Number of optimizer steps already taken, from 0. The first step has factor 1 / warmup, not 0.
        warmup_steps: Number of steps until the factor is 1; 0 for none.
        total_steps: Step at which the factor reaches `floor`; it stays there after.
        decay: Shape after the warm-up.
        floor: Smallest factor after the warm-up, in [0, 1].

    Raises:
        ConfigError: If a number is out of range or the decay is unknown.
    """
    if step < 0 or warmup_steps < 0 or total_steps < warmup_steps:
        raise ConfigError(
            f"step is {step}, warmup_steps {warmup_steps}, total_steps {total_steps}; "
            "step and warmup_steps need 0 or more, total_steps at least warmup_steps"
        )
    if not 0.0 <= floor <= 1.0:
        raise ConfigError(f"learning-rate floor is {floor}; it needs a number from 0 to 1")
    if decay not in get_args(Decay):
        raise ConfigError(f"learning-rate decay is {decay!r}; choose one of {', '.join(get_args(Decay))}")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if decay == "constant":
        return 1.0
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    if decay == "linear":
        return 1.0 - (1.0 - floor) * progress
    return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * progress)) / 2.0
