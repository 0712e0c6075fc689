"""What a loader did and where the time went."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from datapipe.collate import Batch
from datapipe.joined import JoinedStore
from datapipe.pipeline import StageCounters
from storage import FeatureStore

__all__ = ["LoaderMeter", "LoaderStats", "StageStats"]

_ENOUGH_FRACTION: Final = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class StageStats:
    """One stage, over all its workers."""

    name: str
    workers: int  # 0 where the workers of the stage before do its work
    items: int  # pieces of batches
    busy_s: float  # seconds of work, added up over the workers
    idle_s: float  # seconds without an item
    blocked_s: float  # seconds with a result that the next stage had no room for
    mean_queue: float  # pieces waiting, in the mean over those taken

    @property
    def busy_fraction(self) -> float:
        """Share of the workers' time that was work, 0..1; 0 for a stage without workers."""
        if not self.workers:
            return 0.0
        total = self.busy_s + self.idle_s + self.blocked_s
        return self.busy_s / total if total else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderStats:
    """All iterations of a loader so far."""

    batches: int
    samples: int  # of this rank, bad ones not counted
    elapsed_s: float  # from asking for a batch to asking for the next, added up
    wait_s: float  # of these, spent waiting for the loader
    bytes_read: int  # blobs and tensors, by the store's handle and whoever else uses it
    bytes_copied: int  # of these, copied on the way
    stages: tuple[StageStats, ...]
    bad: dict[str, int] = field(default_factory=dict)  # reason -> samples that were left out
    tokens: int = 0  # of the tokenized texts
    padding: int = 0  # places beside them that hold no token

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def wait_fraction(self) -> float:
        """Share of the time that the caller waited for the loader, 0..1."""
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def bad_fraction(self) -> float:
        """Share of the samples that were bad, 0..1."""
        num_bad = sum(self.bad.values())
        return num_bad / (num_bad + self.samples) if num_bad else 0.0

    @property
    def padding_fraction(self) -> float:
        """Share of the places of the tokenized texts that are padding, 0..1."""
        return self.padding / (self.tokens + self.padding) if self.padding else 0.0

    @property
    def bottleneck(self) -> str:
        """The busiest stage, or `caller` where the caller waits for less than a twentieth of the time."""
        if self.wait_fraction < _ENOUGH_FRACTION:
            return "caller"
        return max(self.stages, key=lambda stage: stage.busy_fraction).name

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the derived ones included."""
        stages = [{**asdict(stage), "busy_fraction": stage.busy_fraction} for stage in self.stages]
        derived = ("samples_per_s", "wait_fraction", "bottleneck", "bad_fraction", "padding_fraction")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}, "stages": stages}


class LoaderMeter:
    """Counts while batches pass."""

    def __init__(self, store: FeatureStore | JoinedStore, stages: Sequence[StageCounters]) -> None:
        self._counters = store.counters
        self._read, self._copied = self._counters.bytes_read, self._counters.bytes_copied
        self._stages = stages
        self._batches = self._samples = self._tokens = self._places = 0
        self.bad: Counter[str] = Counter()
        self._wait_s = self._away_s = 0.0

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Pass batches on, and take the times of both sides."""
        while True:
            asked = time.monotonic()
            batch = next(batches, None)
            given = time.monotonic()
            self._wait_s += given - asked
            if batch is None:
                return
            self._batches += 1
            self._samples += len(batch)
            for held in batch.tokens.values():
                self._places += held.ids.numel()
                self._tokens += held.num_tokens
            yield batch
            self._away_s += time.monotonic() - given

    def stats(self) -> LoaderStats:
        return LoaderStats(
            batches=self._batches,
            samples=self._samples,
            elapsed_s=self._wait_s + self._away_s,
            wait_s=self._wait_s,
            bytes_read=self._counters.bytes_read - self._read,
            bytes_copied=self._counters.bytes_copied - self._copied,
            stages=tuple(
                StageStats(
                    name=stage.name,
                    workers=stage.concurrency,
                    items=stage.num_items,
                    busy_s=stage.busy_s,
                    idle_s=stage.idle_s,
                    blocked_s=stage.blocked_s,
                    mean_queue=stage.depth_sum / max(1, stage.num_items),
                )
                for stage in self._stages
            ),
            bad=dict(self.bad),
            tokens=self._tokens,
            padding=self._places - self._tokens,
        )
