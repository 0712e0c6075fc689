"""Weights that follow what they act on: KL penalty and entropy bonus, for each modality of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from unirl.algorithms import AdaptiveEntropy, AdaptiveKL
from unirl.trainer.stages import Stage
from unirl.types import Direction

__all__ = ["Coefficients"]


@dataclass(slots=True)
class _Controllers:
    """Of one modality."""

    kl: AdaptiveKL
    entropy: AdaptiveEntropy


class Coefficients:
    """A stage's adaptive weights. What has no target keeps its first value."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._of = {direction: _controllers(stage.of(direction)) for direction in stage.directions}

    def before_rollout(self) -> Stage:
        """The stage with the KL weights of this step."""
        return self._with({d: {"kl_coef": c.kl.value} for d, c in self._of.items()})

    def before_update(self, seen: Mapping[str, Tensor]) -> Stage:
        """The stage with all weights of this step, given metric sums of its samples (`rollout_metrics`)."""
        values = {}
        for direction, of in self._of.items():
            values[direction] = {"kl_coef": of.kl.value}
            if self._stage.of(direction).entropy_target is not None:
                values[direction]["entropy_coef"] = of.entropy.coefficient(_mean(seen, "entropy", direction))
        return self._with(values)

    def adapt(self, seen: Mapping[str, Tensor]) -> None:
        """Follow what a step's samples showed. A modality without a sample that counts keeps its weights."""
        num = self._stage.samples_per_step / len(self._of)
        for direction, of in self._of.items():
            own = self._stage.of(direction)
            if own.kl_target is not None and float(seen.get(f"kl/{direction}_tokens", 0.0)):
                of.kl = of.kl.update(_mean(seen, "kl", direction), num)
            if own.entropy_target is not None and float(seen.get(f"entropy/{direction}_tokens", 0.0)):
                of.entropy = of.entropy.update(_mean(seen, "entropy", direction))

    def metrics(self, now: Stage) -> dict[str, float]:
        """The weights of a step, by name; with the modality where a stage has two."""
        found = {}
        for direction in self._of:
            own, ending = now.of(direction), f"_{direction}" if len(self._of) > 1 else ""
            found[f"kl/coef{ending}"] = own.kl_coef
            if own.entropy_target is not None:
                found[f"entropy/coef{ending}"] = own.entropy_coef
        return found

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {d: {"kl": asdict(c.kl), "entropy": asdict(c.entropy)} for d, c in self._of.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        for direction, of in self._of.items():
            of.kl = AdaptiveKL(**state[direction]["kl"])
            of.entropy = AdaptiveEntropy(**state[direction]["entropy"])

    def _with(self, values: Mapping[Direction, Mapping[str, float]]) -> Stage:
        stage = self._stage
        text = replace(stage.text, **values.get("text", {}))
        return replace(stage, text=text, image=replace(stage.image, **values.get("image", {})))


def _controllers(stage: Stage) -> _Controllers:
    return _Controllers(
        kl=AdaptiveKL(value=stage.kl_coef, target=stage.kl_target or 1.0, horizon=stage.kl_horizon),
        entropy=AdaptiveEntropy(
            value=stage.entropy_coef, target=stage.entropy_target or 1.0, step=stage.entropy_step
        ),
    )


def _mean(seen: Mapping[str, Tensor], name: str, direction: Direction) -> float:
    tokens = float(seen[f"{name}/{direction}_tokens"])
    return float(seen[f"{name}/{direction}_sum"]) / tokens if tokens else float("nan")
