"""A set of 64-bit identities in little memory, for runs that meet millions of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["IdentitySet"]

_RECENT: Final = 8192  # identities that are kept as Python numbers, at ten times the memory


class IdentitySet:
    """Grows only. The newest members are a set; the others are sorted runs, merged so that they stay few."""

    def __init__(self) -> None:
        self._recent: set[int] = set()
        self._runs: list[NDArray[np.uint64]] = []

    def __contains__(self, identity: int) -> bool:
        if identity in self._recent:
            return True
        if not self._runs:
            return False
        wanted = np.uint64(identity)
        return any(run[min(int(run.searchsorted(wanted)), len(run) - 1)] == wanted for run in self._runs)

    def __len__(self) -> int:
        return len(self._recent) + sum(map(len, self._runs))

    def add(self, identity: int) -> bool:
        """Add one; whether it is new."""
        if identity in self:
            return False
        self._recent.add(identity)
        if len(self._recent) >= _RECENT:
            self._freeze()
        return True

    def has_any(self, identities: Iterable[int]) -> bool:
        """Whether one of them is a member."""
        found = set(identities)
        if not self._recent.isdisjoint(found):
            return True
        wanted = np.fromiter(found, np.uint64, len(found))
        return any(
            bool((run[np.minimum(run.searchsorted(wanted), len(run) - 1)] == wanted).any())
            for run in self._runs
        )

    def members(self, identities: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Those of many that are members, in their order."""
        found = np.fromiter((each in self._recent for each in identities.tolist()), bool, len(identities))
        for run in self._runs:
            found |= run[np.minimum(run.searchsorted(identities), len(run) - 1)] == identities
        members: NDArray[np.uint64] = identities[found]
        return members

    def add_new(self, identities: Iterable[int]) -> None:
        """Add many, none of which is a member."""
        self._recent.update(identities)
        if len(self._recent) >= _RECENT:
            self._freeze()

    def _freeze(self) -> None:
        run = np.fromiter(self._recent, np.uint64, len(self._recent))
        self._recent = set()
        while self._runs and len(self._runs[-1]) <= len(run):
            run = np.concatenate([self._runs.pop(), run])
        run.sort()
        self._runs.append(run)
