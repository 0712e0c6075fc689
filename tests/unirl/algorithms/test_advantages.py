from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.algorithms import dr_grpo_advantages, group_advantages, rloo_advantages
from unirl.errors import RewardError, ShapeError

SCORES = torch.tensor([[1.0, 0.0], [0.5, 0.25]])
NAN = math.nan


def test_verl_values() -> None:
    """verl 0.9.1, compute_grpo_outcome_advantage and compute_rloo_outcome_advantage."""
    grpo = torch.tensor([[0.70711, -0.70711], [0.70710, -0.70710]])
    torch.testing.assert_close(group_advantages(SCORES, eps=1e-6), grpo, atol=6e-6, rtol=0)
    assert rloo_advantages(SCORES).tolist() == [[1.0, -1.0], [0.25, -0.25]]
    assert dr_grpo_advantages(SCORES).tolist() == [[0.5, -0.5], [0.125, -0.125]]


def test_unscored_samples_leave_the_statistics() -> None:
    with_gap = group_advantages(torch.tensor([[1.0, NAN, 0.0, 0.5]]))
    without = group_advantages(torch.tensor([[1.0, 0.0, 0.5]]))
    assert with_gap[0, 1] == 0
    assert with_gap[0, [0, 2, 3]].tolist() == without[0].tolist()
    leave_one_out = rloo_advantages(torch.tensor([[1.0, NAN, 0.0, 0.5]]))
    assert leave_one_out.tolist() == [[0.75, 0.0, -0.75, 0.0]]


@pytest.mark.parametrize("row", [[0.5], [NAN], [NAN, NAN], [0.5, NAN], [0.3, 0.3, 0.3], []])
def test_groups_without_a_comparison_give_zero(row: list[float]) -> None:
    rewards = torch.tensor([row]).reshape(1, len(row))
    for advantages in (group_advantages(rewards), rloo_advantages(rewards), dr_grpo_advantages(rewards)):
        assert advantages.tolist() == [[0.0] * len(row)]


def test_sums_in_another_order_count_as_equal() -> None:
    """0.1 + 0.2 + 0.3 depends on the order in which it is added; the rest must not become a signal."""
    rewards = torch.tensor([[(0.1 + 0.2) + 0.3, 0.1 + (0.2 + 0.3), 0.6]], dtype=torch.float64)
    assert rewards.unique().numel() > 1
    assert not group_advantages(rewards).any()
    tenth = torch.tensor(0.1).float()
    float32 = torch.stack([tenth * 3, tenth + tenth + tenth, torch.tensor(0.3)]).reshape(1, 3)
    assert not group_advantages(float32).any()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.one_of(st.floats(-5, 5).map(lambda x: round(x, 2)), st.just(NAN)), min_size=1, max_size=6))
def test_equals_the_slow_reference(row: list[float]) -> None:
    rewards = torch.tensor([row], dtype=torch.float64)
    known = [r for r in row if not math.isnan(r)]
    varied = len(known) > 1 and max(known) > min(known)
    mean = statistics.fmean(known) if known else 0.0
    deviation = statistics.stdev(known) if varied else 1.0
    grpo, rloo = [], []
    for i, reward in enumerate(row):
        others = [r for j, r in enumerate(row) if j != i and not math.isnan(r)]
        counts = varied and not math.isnan(reward)
        grpo.append((reward - mean) / (deviation + 1e-6) if counts else 0.0)
        rloo.append(reward - statistics.fmean(others) if counts else 0.0)
    torch.testing.assert_close(group_advantages(rewards)[0].tolist(), grpo, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(rloo_advantages(rewards)[0].tolist(), rloo, atol=1e-9, rtol=1e-9)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_order_of_samples_and_prompts_does_not_matter(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    prompts, samples = torch.randperm(3, generator=generator), torch.randperm(5, generator=generator)
    for function in (group_advantages, rloo_advantages):
        moved = function(rewards[prompts][:, samples])
        torch.testing.assert_close(moved, function(rewards)[prompts][:, samples], atol=1e-12, rtol=1e-12)


def test_refusals() -> None:
    with pytest.raises(ShapeError, match=r"\(3,\).*2 axes"):
        group_advantages(torch.zeros(3))
    with pytest.raises(RewardError, match=r"rewards_PG\[0, 1\] is infinite"):
        group_advantages(torch.tensor([[0.0, math.inf]]))
