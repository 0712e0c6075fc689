"""The error tree. Each error also is the built-in that a caller would expect to catch."""

from __future__ import annotations

__all__ = [
    "AlarmError",
    "CheckpointError",
    "ConfigError",
    "RankFailedError",
    "RewardError",
    "RolloutError",
    "ShapeError",
    "UniRLError",
]


class UniRLError(Exception):
    """Root of every error that `unirl` raises on purpose."""


class ConfigError(UniRLError, ValueError):
    """A setting, a combination of settings or a name that cannot be used."""


class ShapeError(UniRLError, ValueError):
    """An array of the wrong rank, shape or dtype."""


class RolloutError(UniRLError, RuntimeError):
    """Generation broke its contract, for example a token outside the grammar."""


class RewardError(UniRLError, RuntimeError):
    """Scoring failed for more samples than the budget allows."""


class AlarmError(UniRLError, RuntimeError):
    """A run that was told to stop at an alarm, and did."""


class RankFailedError(UniRLError, RuntimeError):
    """This rank ended because another one failed before; the message says which and why."""


class CheckpointError(UniRLError, RuntimeError):
    """A checkpoint that is incomplete, damaged, or belongs to another run."""
