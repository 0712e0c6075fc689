"""A reward model from its directory, whatever its kind."""

from __future__ import annotations

from pathlib import Path

from unirl.rewards.preference import HEAD_FILE, Preference
from unirl.rewards.vlm import VlmYesNo

__all__ = ["load_reward"]


def load_reward(directory: str | Path) -> VlmYesNo | Preference:
    """Read a model that `unirl reward train` wrote: a preference reward where there is a head, else yes/no.

    Raises:
        ConfigError: If the directory holds no reward model.
    """
    kind = Preference if (Path(directory) / HEAD_FILE).is_file() else VlmYesNo
    return kind.load(directory)
