"""The order of an epoch: a permutation that only (seed, epoch, index) decide."""

from __future__ import annotations

import itertools
import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from datapipe.order import BLOCK_ROWS, WINDOW_BLOCKS, EpochOrder, rank_bounds

WINDOW_ROWS = BLOCK_ROWS * WINDOW_BLOCKS


@given(num_rows=st.integers(0, 40_000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_an_epoch_is_a_permutation(num_rows: int, seed: int, epoch: int) -> None:
    order = EpochOrder(num_rows, seed=seed, epoch=epoch).take(0, num_rows)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(num_rows))


@given(num_rows=st.integers(1, 40_000), cuts=st.lists(st.integers(0, 40_000), max_size=6))
@settings(max_examples=60, deadline=None)
def test_pieces_join_to_the_whole(num_rows: int, cuts: list[int]) -> None:
    whole = EpochOrder(num_rows, seed=1, epoch=2).take(0, num_rows)
    edges = [0, *sorted(min(cut, num_rows) for cut in cuts), num_rows]
    pieces = [EpochOrder(num_rows, seed=1, epoch=2).take(a, b) for a, b in itertools.pairwise(edges)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {
        tuple(EpochOrder(200, seed=seed, epoch=epoch).take(0, 200)) for seed in range(5) for epoch in range(5)
    }
    assert len(orders) == 25


def test_the_order_is_the_same_for_ever() -> None:
    # A change of this list breaks the resume of every run that was saved before.
    assert EpochOrder(10, seed=0, epoch=0).take(0, 10).tolist() == [8, 7, 4, 2, 6, 5, 9, 0, 1, 3]
    long = EpochOrder(40_000, seed=7, epoch=3).take(0, 40_000)
    assert zlib.crc32(long.astype("<i8").tobytes()) == 466915486


def test_without_shuffle_the_order_is_that_of_the_view() -> None:
    assert EpochOrder(5, seed=9, epoch=7, shuffle=False).take(1, 9).tolist() == [1, 2, 3, 4]


def test_shuffle_quality_over_many_windows() -> None:
    num_rows = 5 * WINDOW_ROWS + 777
    order = EpochOrder(num_rows, seed=4, epoch=0).take(0, num_rows)
    displacement = np.abs(order - np.arange(num_rows)).mean() / num_rows
    assert 0.30 < displacement < 0.37  # 1/3 for a uniform permutation
    assert (np.abs(np.diff(order)) == 1).mean() < 0.005  # neighbours rarely stay neighbours


def test_small_orders_are_uniform() -> None:
    counts = np.zeros((4, 4))
    for seed in range(4000):
        counts[np.arange(4), EpochOrder(4, seed=seed, epoch=0).take(0, 4)] += 1
    assert np.abs(counts / 4000 - 0.25).max() < 0.03


@given(num_rows=st.integers(0, 1000), world_size=st.integers(1, 17))
def test_rank_shares_cover_a_batch_once_in_order(num_rows: int, world_size: int) -> None:
    bounds = [rank_bounds(num_rows, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert bounds[0][0] == 0 and bounds[-1][1] == num_rows
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    sizes = [high - low for low, high in bounds]
    assert max(sizes) - min(sizes) <= 1
