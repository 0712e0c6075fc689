from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.trainer.micro_batches import RowLength, deal_rows, pack_rows, row_cost

Lengths = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 60)), min_size=1, max_size=40)


def test_cost_by_hand() -> None:
    """Ten tokens at width 4: 100 pairs, and 6 x 4 matrix units a token."""
    assert row_cost((4, 6), 4) == 100 + 24 * 10


def test_packed_by_hand() -> None:
    """Budget 12: the row of 10 fills one micro-batch, 5 and 4 fit as 2 x 5, three of 2 as 3 x 2."""
    lengths = [(1, 1), (2, 8), (1, 3), (1, 1), (1, 4), (1, 1)]
    assert pack_rows(lengths, 12) == [[1], [4, 2], [0, 3, 5]]


def test_prompt_and_response_are_padded_apart() -> None:
    """Rows of 6 tokens with the long part on either side make a micro-batch of 2 x (5 + 5)."""
    assert pack_rows([(5, 1), (1, 5)], 12) == [[0], [1]]
    assert pack_rows([(5, 1), (1, 5)], 20) == [[0, 1]]


def test_more_micro_batches_are_made_by_halving_and_then_by_empty_ones() -> None:
    lengths = [(1, 1)] * 3
    assert pack_rows(lengths, 100, num_batches=2) == [[0], [1, 2]]
    assert pack_rows(lengths, 100, num_batches=5) == [[0], [1], [2], [], []]
    assert pack_rows([], 100, num_batches=2) == [[], []]


def test_dealt_by_hand() -> None:
    """8 and 7 to one each, 6 to the rank with 7, 5 to the one with 8, then the last to either's 13."""
    assert deal_rows([5, 6, 7, 8, 4], 2) == [[3, 0, 4], [2, 1]]


@given(Lengths, st.integers(1, 200), st.integers(0, 12))
def test_every_row_goes_once_and_the_budget_holds(
    lengths: list[RowLength], budget: int, num_batches: int
) -> None:
    batches = pack_rows(lengths, budget, num_batches=num_batches)
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    assert len(batches) >= num_batches
    for rows in batches:
        prompt = max((lengths[row][0] for row in rows), default=0)
        response = max((lengths[row][1] for row in rows), default=0)
        assert len(rows) <= 1 or len(rows) * (prompt + response) <= budget


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 5))
def test_no_rank_has_more_than_the_least_and_one_row(costs: list[int], num_ranks: int) -> None:
    hands = deal_rows(costs, num_ranks)
    assert sorted(row for hand in hands for row in hand) == list(range(len(costs)))
    totals = [sum(costs[row] for row in hand) for hand in hands]
    assert max(totals) - min(totals) <= max(costs, default=0)


def test_sorting_saves_padding_where_lengths_have_a_long_tail() -> None:
    """One row in eight is eight times as long: packed rows hold at most a quarter more than their tokens."""
    lengths = [(8, 64 if row % 8 == 0 else 8) for row in range(64)]
    padded = 0
    for rows in pack_rows(lengths, 600):
        padded += len(rows) * (8 + max(lengths[row][1] for row in rows))
    assert padded == pytest.approx(sum(map(sum, lengths)), rel=0.25)
    assert padded < 0.35 * 64 * (8 + 64)
