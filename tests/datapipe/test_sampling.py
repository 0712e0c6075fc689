"""Orders by name: full permutation, drawing with replacement, epochs of a fixed length, and their quality."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datapipe.errors import LoaderError
from datapipe.order import BlockShuffle, Order, ViewOrder
from datapipe.order_quality import OrderQuality, order_quality
from datapipe.sampling import FixedLength, FullShuffle, WithReplacement

ORDERS: dict[str, Order] = {
    "view": ViewOrder(),
    "blocks": BlockShuffle(),
    "full": FullShuffle(),
    "fixed": FixedLength(7000),
    "drawn": WithReplacement(),
    "drawn at length": WithReplacement(length=9000),
}


def whole(order: Order, num_rows: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return order.positions(num_rows, seed=seed, epoch=epoch).take(0, order.num_samples(num_rows))


@pytest.mark.parametrize("name", ORDERS)
@given(num_rows=st.integers(1, 9000), cuts=st.lists(st.integers(0, 9000), max_size=5))
@settings(max_examples=15, deadline=None)
def test_pieces_join_to_the_whole(name: str, num_rows: int, cuts: list[int]) -> None:
    order = ORDERS[name]
    length = order.num_samples(num_rows)
    edges = [0, *sorted(min(cut, length) for cut in cuts), length + 5]
    pieces = [order.positions(num_rows, seed=1, epoch=2).take(a, b) for a, b in itertools.pairwise(edges)]
    joined = np.concatenate(pieces)
    assert joined.dtype == np.int64 and len(joined) == length
    np.testing.assert_array_equal(joined, whole(order, num_rows, 1, 2))
    assert joined.min() >= 0 and joined.max() < num_rows


def test_each_order_has_its_own_fingerprint() -> None:
    others = [WithReplacement(weights=[1, 2]), WithReplacement(weights=[2, 1]), FixedLength(7001)]
    prints = [order.fingerprint() for order in [*ORDERS.values(), *others]]
    assert len(set(prints)) == len(prints)
    assert prints[:2] == [0, 1]  # states that were saved before other orders existed


@pytest.mark.parametrize(
    ("name", "wanted"), [("full", 4215325890), ("fixed", 1564489543), ("drawn", 3898479832)]
)
def test_the_orders_are_the_same_for_ever(name: str, wanted: int) -> None:
    # A change of these numbers breaks the resume of every run that was saved before.
    order = whole(ORDERS[name], 5000, 7, 3)
    assert zlib.crc32(order.astype("<i8").tobytes()) == wanted


@pytest.mark.parametrize("num_rows", [1_000, 16_384, 82_697, 1_000_000])
@pytest.mark.parametrize(("name", "most_adjacent"), [("blocks", 3e-4), ("full", 3e-5)])
def test_the_quality_of_a_shuffle_is_as_documented(num_rows: int, name: str, most_adjacent: float) -> None:
    found = [order_quality(whole(ORDERS[name], num_rows, seed)) for seed in range(3)]
    assert all(abs(quality.mean_displacement - 1 / 3) < 0.015 for quality in found)
    adjacent = np.mean([quality.adjacent_fraction for quality in found])
    assert adjacent < most_adjacent + 4 / num_rows


def test_quality_of_orders_known_by_hand() -> None:
    assert order_quality(np.arange(10)) == OrderQuality(mean_displacement=0.0, adjacent_fraction=1.0)
    assert order_quality(np.array([1, 3, 0, 2])) == OrderQuality(
        mean_displacement=(1 + 2 + 2 + 1) / 4 / 4, adjacent_fraction=0.0
    )
    assert order_quality(np.array([0])).adjacent_fraction == 0.0


def test_a_full_shuffle_is_a_uniform_permutation() -> None:
    counts = np.zeros((4, 4))
    for seed in range(4000):
        counts[np.arange(4), whole(FullShuffle(), 4, seed)] += 1
    assert np.abs(counts / 4000 - 0.25).max() < 0.03


@given(num_rows=st.integers(1, 60), length=st.integers(1, 100), epochs=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_fixed_epochs_repeat_no_row_before_all_others(num_rows: int, length: int, epochs: int) -> None:
    order = FixedLength(length)
    seen = np.concatenate([whole(order, num_rows, 3, epoch) for epoch in range(epochs)])
    assert len(seen) == length * epochs
    counts = np.bincount(seen, minlength=num_rows)
    assert counts.max() - counts.min() <= 1


def test_draws_follow_the_weights() -> None:
    drawn = whole(WithReplacement(length=40_000, weights=[0, 1, 3, 0, 4, 0]), 6)
    counts = Counter(drawn.tolist())
    assert set(counts) == {1, 2, 4}
    for row, share in ((1, 1 / 8), (2, 3 / 8), (4, 4 / 8)):
        assert abs(counts[row] / 40_000 - share) < 0.01
    equal = np.bincount(whole(WithReplacement(length=40_000), 8), minlength=8)
    assert np.abs(equal / 40_000 - 1 / 8).max() < 0.01


def test_epochs_of_draws_differ_and_repeat_rows() -> None:
    first, second = (whole(WithReplacement(), 1000, 0, epoch) for epoch in range(2))
    assert (first != second).any()
    assert 600 < len(set(first.tolist())) < 670  # 1 - 1/e of the rows


@pytest.mark.parametrize("weights", [[], [0, 0], [-1, 2], [np.nan, 1], [[1, 2]]])
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(LoaderError, match="weights of shape"):
        WithReplacement(weights=weights)


def test_weights_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(LoaderError, match="weights are no list of numbers"):
        WithReplacement(weights=["a", "b"])  # type: ignore[list-item]


@pytest.mark.parametrize("weight", [5e-324, 1e-300, 1e-270, 1.0, 1e270, 1.7e308])
def test_weights_of_any_size_are_drawn_by_their_shares(weight: float) -> None:
    order = WithReplacement(length=4000, weights=[weight] * 4 + [0.0] * 4)
    drawn = order.positions(8, seed=0, epoch=0).take(0, 4000)
    np.testing.assert_allclose(np.bincount(drawn, minlength=8) / 4000, [0.25] * 4 + [0.0] * 4, atol=0.03)


def test_lengths_and_weights_of_other_views_are_refused() -> None:
    with pytest.raises(LoaderError, match="3 weights for a view of 4 rows"):
        WithReplacement(weights=[1, 2, 3]).positions(4, seed=0, epoch=0)
    for make in (FixedLength, lambda length: WithReplacement(length=length)):
        with pytest.raises(LoaderError, match="length of an epoch is 0"):
            make(0)
