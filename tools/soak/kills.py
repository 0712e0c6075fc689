"""SIGKILL at random instants of every action, with two writers at work: python -m tools.soak.kills --path P

This program keeps no thread and reads no store itself; everything happens in its children.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tools.soak.actions import ACTIONS, act, check, create, perform
from tools.soak.tracing import Outcome, can_trace, fork, kill_after, kill_at_step

__all__ = ["run_kills"]


class _Rounds:
    """Kills on one store. `steps`, `seconds` hold how long each action took when it last came to its end."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.rng = random.Random(seed)
        self.traces = can_trace()
        self.steps: dict[str, int] = dict.fromkeys(ACTIONS, 60)
        self.seconds: dict[str, float] = dict.fromkeys(ACTIONS, 0.1)
        self.killed: collections.Counter[str] = collections.Counter()

    def play(self, number: int) -> None:
        """Kill one writer in the middle of an action, and another at some moment near it, and check."""
        other = fork(lambda: act(self.path, f"other{number}", self.rng.randrange(1 << 30)))
        try:
            # In rotation, and again until one was in time: every action gets its share of the kills.
            action = list(ACTIONS)[number % len(ACTIONS)]
            for attempt in range(20):
                if self._kill_once(action, number, attempt):
                    self.killed[action] += 1
                    break
        finally:
            self._end(other)
        self._must_pass(fork(lambda: check(self.path, f"check{number}")), f"the check after kill {number}")

    def _kill_once(self, action: str, number: int, attempt: int) -> bool:
        def victim() -> None:
            perform(action, self.path, f"victim{number}", attempt)

        begin = time.monotonic()
        if self.traces and self.rng.random() < 0.75:
            outcome = kill_at_step(victim, self.rng.randrange(self.steps[action] + 1))
        else:
            outcome = kill_after(victim, self.rng.uniform(0, self.seconds[action]))
            if not outcome.killed:
                self.seconds[action] = time.monotonic() - begin
        if not outcome.killed and outcome.steps:
            self.steps[action] = outcome.steps
        elif outcome.steps == self.steps[action]:
            self.steps[action] += 60
        self._must_be_well(outcome, action)
        return outcome.killed

    def _must_be_well(self, outcome: Outcome, action: str) -> None:
        if outcome.code:
            raise SystemExit(f"{action} failed with code {outcome.code}; its error is above")

    def _end(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            raise SystemExit("the other writer failed; its error is above")

    def _must_pass(self, pid: int, what: str) -> None:
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"{what} failed; the store is left at {self.path}")

    def finish(self) -> None:
        """What the killed left behind goes, and nothing else."""

        def clean() -> None:
            from storage import FeatureStore

            store = FeatureStore.open(self.path)
            store.gc(grace_s=0)
            left = sorted(path.name for path in (self.path / "staging").iterdir())
            assert not left, f"gc left {left} in staging"
            assert store.gc(grace_s=0).removed == []
            check(self.path, "end")

        self._must_pass(fork(clean), "the last gc")


def run_kills(path: Path, kills: int, seed: int, tell: Callable[[str], None]) -> dict[str, int]:
    """Kill so many writers of a new store at `path`; how many died in each action.

    Raises:
        SystemExit: When the store lost something or an action failed; the details go to standard error.
    """
    rounds = _Rounds(path, seed)
    rounds._must_pass(fork(lambda: create(path)), "the first commit")
    begin = time.monotonic()
    for number in range(kills):
        rounds.play(number)
        if number % 10 == 9:
            left = (time.monotonic() - begin) / (number + 1) * (kills - number - 1)
            tell(f"{number + 1} of {kills} kills, about {left:.0f} s left: {dict(rounds.killed)}")
    rounds.finish()
    return dict(rounds.killed)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", type=Path, help="the store to make; a temporary one by default")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = given.path or Path(scratch) / "store"
        killed = run_kills(path, given.kills, given.seed, lambda text: print(text, flush=True))
    sys.stdout.write(f"nothing was lost; kills: {json.dumps(killed)}\n")


if __name__ == "__main__":
    main()
