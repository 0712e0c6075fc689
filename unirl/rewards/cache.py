"""Scores kept in a feature store by the content of what was scored."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import xxhash

from storage import DuplicateKeyError, FeatureStore
from unirl.errors import ConfigError
from unirl.rewards.ensemble import AdaptiveReward
from unirl.types import Reward, Sample, Scores

__all__ = ["CachedReward", "IdentifiedReward", "content_key"]

_COMPONENT = "score/"


class IdentifiedReward(Reward, Protocol):
    """A reward that says what it is."""

    @property
    def identity(self) -> str:
        """Another string for other weights, another template or other settings."""
        ...


def content_key(identity: str, sample: Sample) -> str:
    """Hash of the reward's identity and of everything in a sample that a reward may look at, but its key."""
    digest = xxhash.xxh3_128()
    words = (identity, sample.direction, sample.caption, sample.target)
    media = (sample.image, *sample.more_images, *(() if sample.clip is None else (sample.clip,)))
    digest.update(json.dumps([words, [(_dtype_name(part.dtype), part.shape) for part in media]]).encode())
    for part in media:
        digest.update(np.ascontiguousarray(part).data)
    return str(digest.hexdigest())


@cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    """What NumPy calls it, which takes NumPy a third of the time of a key."""
    return str(dtype)


class CachedReward:
    """A reward that scores nothing twice: known scores come from a store, new ones go into it.

    Missing scores are not kept, since what failed once may work the next time. Several processes may share
    a store; what two of them score at the same time is kept once.

    Args:
        reward: Gives a sample the same score alone and in any company, and has an `identity`.
        store: A store of scores, or where to make one. One store may serve several rewards.

    Raises:
        ConfigError: If the reward's scores depend on other samples, as those of an `Ensemble` can; cache its
            members.
    """

    def __init__(self, reward: IdentifiedReward, store: FeatureStore | str | Path) -> None:
        if isinstance(reward, AdaptiveReward):
            raise ConfigError(
                "cache: scores of an ensemble can depend on other samples; give its members caches instead"
            )
        self.reward, self.identity = reward, reward.identity
        self._store = store if isinstance(store, FeatureStore) else FeatureStore.create(store, exist_ok=True)
        self._place: dict[str, int] = {}
        self._values: dict[str, np.ndarray] = {}
        self.num_hits = 0
        """Samples since the start whose score was known."""
        self._read()

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Score B samples, in their order; only those whose content is new reach the reward."""
        keys = [content_key(self.identity, sample) for sample in samples]
        fresh = {key: index for index, key in enumerate(keys) if key not in self._place}
        self.num_hits += len(samples) - len(fresh)
        place_of = {key: place for place, key in enumerate(fresh)}
        missing: dict[str, np.ndarray] = {}
        if fresh:
            scored = self.reward.score([samples[index] for index in fresh.values()])
            found = {"total": scored.total, **{_COMPONENT + n: v for n, v in scored.components.items()}}
            has_all = np.isfinite(np.stack(list(found.values()))).all(axis=0)
            missing = self._keep(list(fresh), found, has_all)
        places = np.array([self._place.get(key, -1) for key in keys], dtype=np.int64)
        known = places >= 0
        lost = np.array([place_of[key] for key in itertools.compress(keys, ~known)], dtype=np.int64)
        values = {name: np.full(len(samples), np.nan) for name in self._values or ("total",)}
        for name, column in values.items():
            if known.any():
                column[known] = self._values[name][places[known]]
            if name in missing:
                column[~known] = missing[name][lost]
        components = {n.removeprefix(_COMPONENT): v for n, v in values.items() if n != "total"}
        return Scores(total=values["total"], components=components)

    def _keep(
        self, keys: Sequence[str], found: dict[str, np.ndarray], known: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Write the rows that have all their numbers; returns what was found, for those that have not."""
        rows = np.flatnonzero(known)
        start = len(self._place)
        for name, values in found.items():
            before = self._values.get(name, np.full(start, np.nan))
            self._values[name] = np.concatenate([before, values[rows]])
        self._place |= {keys[row]: start + place for place, row in enumerate(rows)}
        waiting = rows.tolist()
        while waiting:
            try:
                self._write(keys, found, waiting)
            except DuplicateKeyError:  # another process has scored the same content meanwhile
                self._store = self._store.refresh()
                there = set(self._known("key")["key"].to_pylist())
                waiting = [row for row in waiting if keys[row] not in there]
            else:
                break
        return found

    def _write(self, keys: Sequence[str], found: Mapping[str, np.ndarray], rows: Sequence[int]) -> None:
        columns = dict.fromkeys(found, "float") | {"reward": "string"}
        with self._store.writer(message=f"{len(rows)} scores", columns=columns) as writer:
            for row in rows:
                fields: dict[str, Any] = {name: float(values[row]) for name, values in found.items()}
                writer.add(keys[row], reward=self.identity, **fields)
        self._store = self._store.refresh()

    def _read(self) -> None:
        """Take in what the store knows of this reward."""
        if "reward" not in self._store.columns:
            return
        names = ["total", *(name for name in self._store.columns if name.startswith(_COMPONENT))]
        quoted = ", ".join('"' + name.replace('"', '""') + '"' for name in names)
        table = self._known(f"key, {quoted}")
        self._place = {key: place for place, key in enumerate(table["key"].to_pylist())}
        for name in names:
            values = table[name].to_numpy().astype(np.float64)
            if not len(values) or np.isfinite(values).any():
                self._values[name] = values

    def _known(self, columns: str) -> pa.Table:
        """Columns, as SQL, of the rows of this reward."""
        identity = self.identity.replace("'", "''")
        return self._store.query(f"SELECT {columns} FROM samples WHERE reward = '{identity}'")
