"""Several views in exact proportions, and curricula: an endless sequence, cut into epochs."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from datapipe.errors import LoaderError
from datapipe.joined import join_views
from datapipe.order import Positions
from datapipe.sampling import Passes
from datapipe.shares import FAR, Shares
from datapipe.whole_numbers import whole_number
from storage import FeatureStore, View

__all__ = ["Mixture", "MixtureSource", "curriculum"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSource:
    """One view of a mixture."""

    view: View
    weight: float = 1.0  # share before dividing by the sum; 0 leaves it to the schedule
    max_passes: int | None = None  # passes over the view in the whole run; then the others take its share


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phase:
    """A stretch of the sequence with the same shares."""

    start: int  # first sample of the run
    sources: NDArray[np.int64]  # numbers of the sources that have a share
    taken: NDArray[np.int64]  # samples of each of them before `start`
    shares: Shares


class Mixture:
    """An order over several views, of one store or of several: `Loader(mixture.view, order=mixture)`.

    The source of sample i of the run follows from i. Between two changes of the weights each source has its
    share of any stretch, off by less than ceil(log2(sources)) samples. Each source is visited in
    block-shuffled passes of its own, which go on from one epoch of the loader to the next: no row comes again
    before its source is through.
    """

    def __init__(
        self,
        sources: Mapping[str, MixtureSource],
        *,
        length: int,
        schedule: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        """Args:
        sources: Views by name. A row may be in several. Views of several stores make `mixture.view` a
            JoinedView, whose `locate` tells the store and the row in it of the row numbers of a batch.
        length: Samples of an epoch of the loader.
        schedule: A curriculum: weights by the sample of the run (step x batch size) from which on they hold.
            A source that is not named has none. Before the first entry the sources' own weights hold.

        Raises:
            LoaderError: For no sources, empty views, stores whose columns clash, weights that are no shares,
                or a stretch of the run in which no source has rows left.
        """
        _check_sources(sources, length)
        schedule = {0: {name: source.weight for name, source in sources.items()}, **(schedule or {})}
        _check_schedule(schedule, sources)
        self._sources, self._length = dict(sources), length
        self._schedule = dict(sorted(schedule.items()))
        self.view = join_views([source.view for source in sources.values()])
        self._phases = self._plan()

    def num_samples(self, num_rows: int) -> int:
        """The length of an epoch."""
        if num_rows != len(self.view):
            raise LoaderError(
                f"the view has {num_rows} rows, those of the mixture {len(self.view)}; give the loader "
                f"the view of the mixture: Loader(mixture.view, order=mixture)"
            )
        return self._length

    def positions(self, num_rows: int, *, seed: int, epoch: int) -> Positions:
        """The samples epoch x length and on of the run.

        Raises:
            LoaderError: For an epoch that lies beyond 2^40 samples.
        """
        if (epoch + 1) * self._length > FAR:
            raise LoaderError(
                f"epoch {epoch} of {self._length} samples ends beyond {FAR}, where no mixture goes"
            )
        passes = [
            Passes(len(source.view), seed=seed ^ zlib.crc32(name.encode()))
            for name, source in self._sources.items()
        ]
        return _MixedEpoch(mixture=self, passes=passes, first=epoch * self._length, length=self._length)

    def fingerprint(self) -> int:
        """Of the sources' names, sizes and caps, and of all weights."""
        sources = [(name, len(each.view), each.max_passes) for name, each in self._sources.items()]
        schedule = [(start, sorted(weights.items())) for start, weights in self._schedule.items()]
        return zlib.crc32(repr((sources, self._length, schedule)).encode())

    def deal(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The samples start..stop of the run.

        Returns:
            int64 (n,) number of the source, in the order in which the sources were given; int64 (n,) how many
            samples of this source came before.
        """
        ends = [*(phase.start for phase in self._phases[1:]), FAR]
        found = [np.empty((2, 0), np.int64)]
        for phase, end in zip(self._phases, ends, strict=True):
            low, high = max(start, phase.start), min(stop, end)
            if low < high:
                counts = phase.shares.counts(np.arange(low - phase.start, high - phase.start + 1))
                chosen = np.diff(counts, axis=1).argmax(axis=0)
                ordinals = counts[chosen, np.arange(high - low)] + phase.taken[chosen]
                found.append(np.stack([phase.sources[chosen], ordinals]))
        numbers, ordinals = np.concatenate(found, axis=1)
        return numbers, ordinals

    def _plan(self) -> list[_Phase]:
        caps = np.array([_cap(source) for source in self._sources.values()], np.int64)
        taken = np.zeros(len(caps), np.int64)
        weights = np.zeros(len(caps))
        phases: list[_Phase] = []
        start = 0
        while True:
            if start in self._schedule:
                weights = np.array([self._schedule[start].get(name, 0.0) for name in self._sources])
            sources = np.flatnonzero((weights > 0) & (taken < caps))
            if not len(sources):
                raise LoaderError(
                    f"from sample {start} of the run on no source has rows left; leave one with a weight "
                    f"without max_passes"
                )
            shares = Shares(weights[sources].tolist())
            phases.append(_Phase(start=start, sources=sources, taken=taken[sources], shares=shares))
            left = (caps - taken)[sources].tolist()
            ends = [start + shares.first_with(index, count) for index, count in enumerate(left)]
            end = min([at for at in [*self._schedule, *ends] if start < at < FAR], default=None)
            if end is None:
                return phases
            taken[sources] += shares.counts(np.array([end - start]))[:, 0]
            start = end


def curriculum(store: FeatureStore, queries: Mapping[int, str], *, length: int) -> Mixture:
    """A schedule of queries, one after the other: `Loader(mixture.view, order=mixture)`.

    A row that several queries find comes up in each of their times. A query that comes again goes on where it
    stopped.

    Args:
        store: Opened once; all queries are made on its snapshot.
        queries: SQL conditions by the sample of the run (step x batch size) from which on they hold; one of
            them from 0 on.
        length: Samples of an epoch of the loader.

    Raises:
        LoaderError: For a query that finds no row, or none that holds from sample 0 on.
    """
    if 0 not in queries:
        raise LoaderError(f"the queries of a curriculum start at {sorted(queries)}; one must hold from 0 on")
    sources = {query: MixtureSource(view=store.select(query)) for query in queries.values()}
    schedule = {start: {query: 1.0} for start, query in queries.items()}
    return Mixture(sources, length=length, schedule=schedule)


@dataclass(frozen=True, kw_only=True, slots=True)
class _MixedEpoch:
    mixture: Mixture
    passes: list[Passes]
    first: int  # sample of the run that the epoch begins with
    length: int

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        numbers, ordinals = self.mixture.deal(self.first + start, self.first + min(stop, self.length))
        begins = np.cumsum([0, *(each.num_rows for each in self.passes)])
        positions = np.empty(len(numbers), np.int64)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            positions[mine] = begins[number] + self.passes[number].pick(ordinals[mine])
        return positions


def _cap(source: MixtureSource) -> int:
    return FAR if source.max_passes is None else min(FAR, source.max_passes * len(source.view))


def _check_sources(sources: Mapping[str, MixtureSource], length: int) -> None:
    if not isinstance(sources, Mapping) or not sources:
        raise LoaderError(f"sources of a mixture are {sources!r}, wanted one or more by name")
    whole_number("length", length, 1)
    for name, source in sources.items():
        if not isinstance(source, MixtureSource) or not isinstance(source.view, View):
            raise LoaderError(f"source {name!r} is {source!r}, wanted MixtureSource(view=store.select(...))")
        if source.max_passes is not None:
            whole_number(f"max_passes of source {name!r}", source.max_passes, 1)
        if not len(source.view):
            raise LoaderError(f"source {name!r} has 0 rows; widen its query, or leave it out")


def _check_schedule(
    schedule: Mapping[int, Mapping[str, float]], sources: Mapping[str, MixtureSource]
) -> None:
    for start, weights in schedule.items():
        whole_number("a sample of the schedule", start, 0)
        wrong = {name: weight for name, weight in weights.items() if not _is_share(weight)}
        unknown = sorted(weights.keys() - sources.keys())
        if wrong or unknown:
            raise LoaderError(
                f"the weights from sample {start} on are no shares of the sources {sorted(sources)}: "
                f"unknown {unknown}, not 0 or more {wrong}"
            )


def _is_share(weight: object) -> bool:
    return isinstance(weight, Real) and 0 <= float(weight) < math.inf
