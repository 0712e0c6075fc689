from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.algorithms import (
    masked_moments_sums,
    masked_sum,
    moments_from_sums,
    sequence_mean_weights,
    whiten,
)
from unirl.errors import ShapeError

X = torch.tensor([[1.0, 3.0, 9.0], [5.0, 7.0, 9.0]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_moments_worked_by_hand() -> None:
    """1, 3, 5: mean 3, sample variance 4."""
    sums = masked_moments_sums(X, MASK)
    assert sums.dtype == torch.float64 and sums.tolist() == [3.0, 9.0, 35.0]
    moments = moments_from_sums(sums)
    assert (moments.count.item(), moments.mean.item(), moments.var.item()) == (3.0, 3.0, 4.0)
    expected = torch.tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(whiten(X, MASK), expected)


def test_sums_and_weights() -> None:
    assert masked_sum(X, MASK) == 9.0
    weights = sequence_mean_weights(torch.cat([MASK, torch.zeros(1, 3, dtype=torch.bool)]))
    assert weights.tolist() == [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_entries_have_no_deviation(count: int) -> None:
    mask = torch.arange(3).expand(1, 3) < count
    assert whiten(X[:1], mask).tolist() == [[0.0, 0.0, 0.0]]


def test_equal_entries_whiten_to_zero() -> None:
    equal = torch.full((2, 3), 0.1)
    assert whiten(equal, torch.ones(2, 3, dtype=torch.bool)).abs().max() < 1e-3


def test_a_large_offset_does_not_drown_the_deviation() -> None:
    moments = moments_from_sums(masked_moments_sums(X + 4096.0, MASK))
    assert moments.var.item() == pytest.approx(4.0, rel=1e-6)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), cut=st.integers(0, 6))
def test_ranks_that_share_moments_whiten_as_one(seed: int, cut: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(6, 4, generator=generator, dtype=torch.float64) + 1
    mask = torch.rand(6, 4, generator=generator) < 0.6
    ranks = [(x[:cut], mask[:cut]), (x[cut:], mask[cut:])]
    moments = moments_from_sums(sum(masked_moments_sums(*rank) for rank in ranks))
    parts = torch.cat([whiten(*rank, moments=moments) for rank in ranks])
    torch.testing.assert_close(parts, whiten(x, mask), atol=1e-10, rtol=0)
    if mask.sum() > 1:
        assert moments.mean.item() == pytest.approx(x[mask].mean().item())
        assert moments.var.item() == pytest.approx(x[mask].var().item())


def test_refusals() -> None:
    with pytest.raises(ShapeError, match=r"\(2, 3\).*\(2, 2\)"):
        masked_moments_sums(X, MASK[:, :2])
    with pytest.raises(ShapeError, match=r"\(2,\)"):
        moments_from_sums(torch.zeros(2))
