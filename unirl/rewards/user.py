"""A reward from a plain function, which may do what user code does: raise, hang, exit or crash."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from unirl.errors import ConfigError
from unirl.rewards.failures import Problem, account
from unirl.rewards.identity import identity_of
from unirl.rewards.worker_pool import WorkerPool
from unirl.types import Sample, Scores

__all__ = ["UserReward"]

ScoreFunction = Callable[[Sample], float | Mapping[str, float]]


class UserReward:
    """Score each sample with a function, in processes of its own and within a time limit.

    A sample on which the function raises, exits, crashes or takes too long has no score; the reason, with the
    Python stack of a hang or crash, is logged and counted, and everything else goes on.

    Args:
        function: Sample -> a number, or a mapping with "total" and the `parts`. It must stand in a module,
            under its own name, because another process imports it.
        name: Of the component; the function's own by default.
        parts: Names of what else the function gives; they become components "<name>/<part>".
        limit_s: Longest time for one sample, seconds.
        num_workers: Processes.
        max_failed_fraction: Share of the samples of one call that may go without a score.

    Raises:
        ConfigError: If the function cannot be imported by another process.
    """

    def __init__(
        self,
        function: ScoreFunction,
        *,
        name: str | None = None,
        parts: Sequence[str] = (),
        limit_s: float = 5.0,
        num_workers: int = 2,
        max_failed_fraction: float = 0.1,
    ) -> None:
        shown = str(getattr(function, "__qualname__", type(function).__qualname__))
        if (problem := _import_problem(function)) is not None:
            raise ConfigError(f"reward {shown}: {problem}")
        if not limit_s > 0 or num_workers < 1:
            raise ConfigError(f"reward {shown}: limit_s {limit_s}, num_workers {num_workers}; wanted above 0")
        self.name = name or shown
        self.parts = tuple(parts)
        self.max_failed_fraction = max_failed_fraction
        self.failures: Counter[str] = Counter()
        """Samples without a score since the start, by reason."""
        self.identity = identity_of(self.name, [function.__module__, shown, _source(function), parts])
        """Another string for another function or another text of it."""
        self._pool = WorkerPool(
            partial(_call, function, self.parts), name=self.name, num_workers=num_workers, limit_s=limit_s
        )

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Score B samples, in their order.

        Raises:
            RewardError: If more than `max_failed_fraction` of the samples could not be scored.
            ConfigError: If the function's module cannot be imported in a process of its own.
        """
        values = np.full((1 + len(self.parts), len(samples)), np.nan)
        problems: dict[int, Problem] = {}
        for row, answer in enumerate(self._pool.run(samples)):
            if isinstance(answer, Problem):
                problems[row] = answer
            else:
                values[:, row] = answer
        account(
            self.failures,
            samples,
            problems,
            reward=self.name,
            max_failed_fraction=self.max_failed_fraction,
        )
        names = [self.name, *(f"{self.name}/{part}" for part in self.parts)]
        return Scores(total=values[0].copy(), components=dict(zip(names, values)))

    def close(self) -> None:
        """End the processes; also done when the reward is forgotten."""
        self._pool.close()


def _call(function: ScoreFunction, parts: Sequence[str], sample: Sample) -> list[float] | Problem:
    """Total and parts of one sample; runs in the other process."""
    given = function(sample)
    found = given if isinstance(given, Mapping) else {"total": given}
    wanted = ("total", *parts)
    if set(found) != set(wanted):
        text = f"gave {', '.join(map(repr, found))}; wanted {', '.join(map(repr, wanted))}"
        return Problem(reason="no score", text=text)
    values = []
    for name in wanted:
        try:
            value = float(found[name])
        except (TypeError, ValueError):
            return Problem(reason="no score", text=f"{name} is {found[name]!r}, wanted a number")
        if not math.isfinite(value):
            return Problem(reason="no score", text=f"{name} is {value}, wanted a finite number")
        values.append(value)
    return values


def _import_problem(function: ScoreFunction) -> str | None:
    """Say why another process could not import a function, or None."""
    named = function if hasattr(function, "__qualname__") else type(function)
    module, path = named.__module__, named.__qualname__
    remedy = f"move `{named.__name__}` into a module, such as my_rewards.py, and import it from there"
    if module == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        return f"it is defined in a notebook or at a prompt, where no other process finds it; {remedy}"
    if "<lambda>" in path or "<locals>" in path:
        return f"it is defined inside another function or as a lambda, so it cannot be imported; {remedy}"
    found: object = sys.modules.get(module) or importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return None if found is named else f"{module}.{path} is something else by now; {remedy}"


def _source(function: ScoreFunction) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    try:
        return inspect.getsource(named)
    except (OSError, TypeError):
        return ""
