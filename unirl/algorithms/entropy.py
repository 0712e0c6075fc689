"""The adaptive entropy coefficient: a bonus that comes on when the policy gets too sure of itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from unirl.errors import ConfigError

__all__ = ["AdaptiveEntropy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveEntropy:
    """An entropy coefficient that holds entropy above a target. `dataclasses.asdict` is its state.

        coefficient = value   if entropy <= target, else 0
        value      += step    if entropy < target,  value -= step if entropy > target;  value stays >= 0

    So nothing is charged while entropy is high enough, and the bonus grows for as long as it is not.

    Example: `AdaptiveEntropy(value=0.0, target=2.0, step=0.005).update(1.5).value` is 0.005.

    Source: He et al. 2025, "Skywork Open Reasoner 1 Technical Report", arXiv:2505.22312, sec. 3.2.5, eq. 3.2,
    compared with its text: the rule is the same, also where entropy is the target. The equation has no lower
    bound; the coefficient of eq. 3.1 is 0 or more, so value stops at 0 here.
    """

    value: float
    """Coefficient now, 0 or more, of the mean entropy of a token."""
    target: float
    """Wanted entropy, nats a token, above 0."""
    step: float
    """Change of the coefficient in one step, above 0."""

    def __post_init__(self) -> None:
        for name, number, is_good in (
            ("coefficient", self.value, self.value >= 0),
            ("target", self.target, self.target > 0),
            ("step", self.step, self.step > 0),
        ):
            if not (math.isfinite(number) and is_good):
                wanted = "from 0" if name == "coefficient" else "above 0"
                raise ConfigError(f"entropy {name} is {number}; it needs a finite number {wanted}")

    def coefficient(self, entropy: float) -> float:
        """What a step whose samples have this mean entropy is trained with."""
        return self.value if entropy <= self.target else 0.0

    def update(self, entropy: float) -> AdaptiveEntropy:
        """Return the controller after a step whose samples had this mean entropy.

        Raises:
            ConfigError: If entropy is not finite.
        """
        if not math.isfinite(entropy):
            raise ConfigError(f"measured entropy is {entropy}; look for NaN or infinity in the logits")
        change = self.step * ((entropy < self.target) - (entropy > self.target))
        return replace(self, value=max(self.value + change, 0.0))
