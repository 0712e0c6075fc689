"""For any rows, batches, ranks, workers and stops, ranks and resumes together see exactly the epoch."""

from __future__ import annotations

import functools
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datapipe import Loader, Mixture, MixtureSource, PixelBuckets, TokenBuckets
from storage import FeatureStore, View

MOST_RANKS = 4


@functools.cache
def whole_view() -> View:
    """90 rows in three shards."""
    store = FeatureStore.create(Path(tempfile.mkdtemp()) / "store")
    for start in (0, 40, 70):
        rows = range(start, {0: 40, 40: 70, 70: 90}[start])
        store.append({"key": f"{index:03d}", "caption": "x"} for index in rows)
    return store.refresh().select()


def fixed(num_rows: int, batch: int) -> tuple[View, dict[str, Any]]:
    return whole_view()[:num_rows], {"batch_size": batch}


def tokens(num_rows: int, batch: int) -> tuple[View, dict[str, Any]]:
    lengths = np.random.default_rng(num_rows).integers(1, 50, num_rows)
    buckets = TokenBuckets(lengths, token_budget=50 * batch, multiple_of=MOST_RANKS)
    return whole_view()[:num_rows], {"buckets": buckets}


def pixels(num_rows: int, batch: int) -> tuple[View, dict[str, Any]]:
    sizes = np.random.default_rng(num_rows).integers(20, 60, (num_rows, 2))
    buckets = PixelBuckets(
        sizes, image_pixels=64 * 64, pixel_budget=64 * 64 * batch, multiple_of=MOST_RANKS, side_multiple=16
    )
    return whole_view()[:num_rows], {"buckets": buckets}


def mixed(num_rows: int, batch: int) -> tuple[View, dict[str, Any]]:
    """Three of the first half for one of the second."""
    view, half = whole_view()[:num_rows], max(1, num_rows // 2)
    sources = {"a": MixtureSource(view=view[:half], weight=3), "b": MixtureSource(view=view[half - 1 :])}
    mixture = Mixture(sources, length=num_rows + 3)
    return mixture.view, {"order": mixture, "batch_size": batch}


@pytest.mark.parametrize("make", [fixed, tokens, pixels, mixed])
@given(
    num_rows=st.integers(2, 90),
    batch=st.integers(MOST_RANKS, 16),
    ranks=st.lists(st.integers(1, MOST_RANKS), min_size=1, max_size=3),
    workers=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    stops=st.lists(st.integers(0, 4), min_size=3, max_size=3),
)
@settings(max_examples=10, deadline=None)
def test_ranks_and_resumes_see_exactly_the_epoch(
    make: Any, num_rows: int, batch: int, ranks: list[int], workers: list[int], stops: list[int]
) -> None:
    check(make, num_rows, batch, [*zip(ranks, stops), (1, 1000)], workers)


@pytest.mark.parametrize("make", [fixed, tokens, pixels, mixed])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_four_ranks_stop_and_fewer_go_on(make: Any, ranks: int) -> None:
    check(make, 85, 12, [(4, 3), (ranks, 1000)], [2, 1, 3, 1])


def check(make: Any, num_rows: int, batch: int, plan: list[tuple[int, int]], workers: list[int]) -> None:
    """Go through an epoch as planned: pairs of a number of ranks and the steps that they make."""
    view, options = make(num_rows, batch)

    def loaders(world_size: int) -> list[Loader]:
        return [
            Loader(
                *(view,),
                image=None,
                columns=(),
                seed=5,
                drop_last=False,
                rank=rank,
                world_size=world_size,
                num_threads=workers[rank],
                prefetch_batches=workers[-1 - rank],
                **options,
            )
            for rank in range(world_size)
        ]

    whole = [key for batch in loaders(1)[0] for key in batch.keys]
    if make is not mixed:
        assert Counter(whole) == Counter(view.keys())
    seen: list[str] = []
    state: dict[str, int] | None = None
    for world_size, stop in plan:
        ranks = loaders(world_size)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        running = [iter(loader) for loader in ranks]
        for _ in range(stop):
            shares = [next(batches, None) for batches in running]
            assert len({share is None for share in shares}) == 1
            if shares[0] is None:
                break
            seen += [key for share in shares for key in share.keys]
        states = [loader.state_dict() for loader in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
        if state["epoch"] == 1:
            break
    assert seen == whole
