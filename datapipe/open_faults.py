"""The quarantine while sources are read again: what is known there, and what is settled now."""

from __future__ import annotations

from collections.abc import Iterable

from datapipe.sources.listing import METADATA_NAMES
from datapipe.sources.record import Source
from datapipe.sources.rows import is_table
from datapipe.sources.webdataset import TAR_SUFFIXES
from storage import FeatureStore

__all__ = ["OpenFaults"]

_LOST, _PART = "damaged", "part "  # how a repair records a row
_AFTER_NAME = ("!", ":", "#", " @")  # what follows the name of a file in places within it


class OpenFaults:
    """Places of the quarantine that no later record settles."""

    def __init__(self, store: FeatureStore | None) -> None:
        """Args:
        store: None for a store that is not made yet.
        """
        self._reasons: dict[str, set[str]] = {}
        self._met: set[str] = set()
        self._lost: dict[str, list[str]] = {}  # key -> places in the store, of rows that a repair gave up
        if store is None:
            return
        columns = (store.quarantined().column(name).to_pylist() for name in ("key", "place", "reason"))
        for key, place, reason in zip(*columns):
            code = reason.partition(":")[0]
            self._reasons.setdefault(place, set()).add(code)
            if code == _LOST and place.startswith(_PART):
                self._lost.setdefault(key, []).append(place)

    def meet(self, place: str, reason: str) -> bool:
        """Note that a place is bad still; tell whether the quarantine has this reason for it."""
        self._met.add(place)
        return reason in self._reasons.get(place, ())

    def outdates(self, place: str, reason: str) -> bool:
        """Whether the quarantine has other reasons only for a place not met yet. They are forgotten."""
        known = self._reasons.get(place)
        if not known or reason in known or place in self._met:
            return False
        known.clear()
        return True

    def found_again(self, keys: Iterable[str]) -> list[str]:
        """Places of rows of these keys that a repair of the store gave up. They are forgotten."""
        return [place for key in keys for place in self._lost.pop(key, ())] if self._lost else []

    @property
    def places(self) -> frozenset[str]:
        """All of them."""
        return frozenset(self._reasons)

    def has(self, source: Source) -> bool:
        """Whether a source has any of them."""
        return any(_is_of(source, place) for place in self._reasons)

    def settled_by(self, source: Source) -> list[str]:
        """Places of a source that was read to its end, where nothing bad was met any more."""
        return [place for place in self._reasons if place not in self._met and _is_of(source, place)]


def _is_of(source: Source, place: str) -> bool:
    if place == source.name or place.startswith(tuple(source.name + mark for mark in _AFTER_NAME)):
        return True
    if not place.startswith(source.name + "/"):
        return False
    # Tars and tables in a folder are sources of their own, except the tables that describe it.
    name = place.rpartition("/")[2]
    for mark in _AFTER_NAME:
        name = name.partition(mark)[0]
    name = name.lower()
    return name in METADATA_NAMES or not (name.endswith(TAR_SUFFIXES) or (is_table(name) and _is_bulk(name)))


def _is_bulk(name: str) -> bool:
    return not name.endswith((".json", ".txt"))  # these are sidecars in a folder
