from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unirl.algorithms import gae, whiten
from unirl.errors import ConfigError, ShapeError

REWARDS = torch.tensor([[0.0, 0.0, 1.0], [0.0, 2.0, 0.0]])
VALUES = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
MASK = torch.tensor([[True, True, True], [True, True, False]])


def slow_gae(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float, bootstrap: float
) -> list[float]:
    """Equation 16 of the paper as an explicit sum over the valid tokens of one row."""
    steps = [t for t, valid in enumerate(mask) if valid]
    next_values = [values[t] for t in steps[1:]] + [bootstrap]
    deltas = [rewards[t] + gamma * v - values[t] for t, v in zip(steps, next_values)]
    advantages = [0.0] * len(mask)
    for i, t in enumerate(steps):
        advantages[t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
    return advantages


def random_batch(seed: int, rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, tokens, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, tokens, generator=generator) < 0.7
    bootstrap = torch.randn(rows, generator=generator, dtype=torch.float64)
    return rewards, values, mask, bootstrap


def test_worked_by_hand() -> None:
    """One row, gamma = lam = 1/2: d2 = 4 - 3 = 1, d1 = 2 + 3/2 - 2 = 1.5, d0 = 0 + 2/2 - 1 = 0."""
    advantages, returns = gae(
        torch.tensor([[0.0, 2.0, 4.0]]),
        torch.tensor([[1.0, 2.0, 3.0]]),
        torch.ones(1, 3, dtype=torch.bool),
        gamma=0.5,
        lam=0.5,
    )
    assert advantages.tolist() == [[0.4375, 1.75, 1.0]]
    assert returns.tolist() == [[1.4375, 3.75, 4.0]]


def test_verl_values() -> None:
    """verl 0.9.1, compute_gae_advantage_return(REWARDS, VALUES, MASK.float(), 0.99, 0.95)."""
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma=0.99, lam=0.95)
    expected = torch.tensor([[-0.59637, -0.72526, -0.85972], [1.09766, 1.08369, 0.0]])
    torch.testing.assert_close(whiten(advantages, MASK), expected, atol=6e-6, rtol=0)
    expected_returns = torch.tensor([[0.90841, 0.95535, 1.0], [1.90575, 2.0, 0.0]])
    torch.testing.assert_close(returns, expected_returns, atol=6e-6, rtol=0)


def test_a_gap_neither_discounts_nor_pays() -> None:
    """A masked step with a huge reward and value between two tokens changes nothing."""
    whole = gae(
        torch.tensor([[0.0, 1.0]]),
        torch.tensor([[0.5, 0.25]]),
        torch.ones(1, 2, dtype=torch.bool),
        gamma=0.9,
        lam=0.8,
    )
    gapped = gae(
        torch.tensor([[0.0, 1e6, 1.0]]),
        torch.tensor([[0.5, -1e6, 0.25]]),
        torch.tensor([[True, False, True]]),
        gamma=0.9,
        lam=0.8,
    )
    for short, long in zip(whole, gapped):
        assert long[:, [0, 2]].tolist() == short.tolist()
        assert long[0, 1] == 0


def test_lambda_one_gives_discounted_returns() -> None:
    _, returns = gae(REWARDS, VALUES, MASK, gamma=0.9, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[0.81, 0.9, 1.0], [1.8, 2.0, 0.0]]))


def test_nan_under_the_mask_stays_there() -> None:
    rewards, values = REWARDS.clone(), VALUES.clone()
    rewards[1, 2] = values[1, 2] = torch.nan
    clean = gae(REWARDS, VALUES, MASK, gamma=0.99, lam=0.95)
    for left, right in zip(clean, gae(rewards, values, MASK, gamma=0.99, lam=0.95)):
        assert left.equal(right)


def test_empty_rows_and_no_tokens() -> None:
    advantages, returns = gae(REWARDS, VALUES, torch.zeros(2, 3, dtype=torch.bool), gamma=1.0, lam=1.0)
    assert not advantages.any() and not returns.any()
    empty = torch.zeros(2, 0)
    assert gae(empty, empty, empty.bool(), gamma=1.0, lam=1.0)[0].shape == (2, 0)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 4),
    tokens=st.integers(1, 7),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_equals_the_slow_reference(seed: int, rows: int, tokens: int, gamma: float, lam: float) -> None:
    rewards, values, mask, bootstrap = random_batch(seed, rows, tokens)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap_B=bootstrap)
    expected = torch.tensor(
        [
            slow_gae(
                rewards[b].tolist(), values[b].tolist(), mask[b].tolist(), gamma, lam, float(bootstrap[b])
            )
            for b in range(rows)
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(advantages, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0.0), atol=1e-10, rtol=1e-10)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), left=st.integers(0, 3), right=st.integers(0, 3))
def test_rows_and_padding_do_not_matter(seed: int, left: int, right: int) -> None:
    rewards, values, mask, bootstrap = random_batch(seed, 4, 5)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    padded = [torch.nn.functional.pad(x[order], (left, right)) for x in (rewards, values, mask)]
    plain = gae(rewards, values, mask, gamma=0.97, lam=0.9, bootstrap_B=bootstrap)
    moved = gae(*padded, gamma=0.97, lam=0.9, bootstrap_B=bootstrap[order])
    for left_result, right_result in zip(plain, moved):
        assert right_result[:, left : left + 5].equal(left_result[order])


def test_refusals_name_both_shapes() -> None:
    with pytest.raises(ShapeError, match=r"\(2, 3\).*\(2, 2\)"):
        gae(REWARDS, VALUES[:, :2], MASK, gamma=1.0, lam=1.0)
    with pytest.raises(ShapeError, match=r"\(3,\).*\(2, 3\)"):
        gae(REWARDS, VALUES, MASK, gamma=1.0, lam=1.0, bootstrap_B=torch.zeros(3))
    with pytest.raises(ShapeError, match=r"torch\.bool"):
        gae(REWARDS, VALUES, MASK.float(), gamma=1.0, lam=1.0)
    with pytest.raises(ConfigError, match=r"lam is 1\.5"):
        gae(REWARDS, VALUES, MASK, gamma=1.0, lam=1.5)
