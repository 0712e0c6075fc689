"""How a run makes the reward that its stages are trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unirl.rewards import load_reward
from unirl.types import Reward

__all__ = ["ModelAlone", "Scoring"]


class Scoring(Protocol):
    """Which rewards a run is trained on. A frozen dataclass, so that the run's record names its settings."""

    def reward(self, model: Path) -> Reward:
        """Return the reward.

        Args:
            model: Folder of the run's reward model; there is none if the recipe has none.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAlone:
    """The run's reward model and nothing else."""

    def reward(self, model: Path) -> Reward:
        """Read it."""
        return load_reward(model)
